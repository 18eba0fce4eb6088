"""Tests flash_attn_with_kvcache in half precision on a CPU and on a GPU, and what a call that was seen before does."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from frameworks import empty_plan_caches

from attn_core.backends import triton_splitkv
from attn_core.backends.shared import triton as triton_launch
from torch_frontend import append_kv, attention
from torch_frontend.dispatch import plan
from torch_frontend.flash_attn import cute, flash_attn_with_kvcache, hopper
from torch_frontend.paged import tables as page_tables

pytestmark = pytest.mark.sampled

BATCH, LENGTH, SIZE, HEADS, DIM = 3, 48, 16, (8, 2), 64
INT: Any = {"dtype": torch.int32}


def draw(device: str, *shape: int, seed: int = 0) -> torch.Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return numbers.to(device, torch.bfloat16)


def cached(device: str, form: str, new: int, rotary: bool) -> dict[str, Any]:
    """The arguments of a call with as many queries as new tokens."""
    rows = {"rows": BATCH, "index": BATCH + 2, "leftpad": BATCH, "pages": BATCH * LENGTH // SIZE}[form]
    pool = (rows, SIZE if form == "pages" else LENGTH, HEADS[1], DIM)
    call: dict[str, Any] = {
        "q": draw(device, BATCH, new, HEADS[0], DIM, seed=1),
        **{f"{name}_cache": draw(device, *pool, seed=at) for at, name in enumerate("kv", 2)},
        **{name: draw(device, BATCH, new, HEADS[1], DIM, seed=at) for at, name in enumerate("kv", 4)},
        "cache_seqlens": torch.tensor([20, 7, LENGTH - new], **INT, device=device),
        "causal": True,
        "return_softmax_lse": True,
    }
    if form == "index":
        call["cache_batch_idx"] = torch.tensor([4, 0, 2], **INT, device=device)
    if form == "leftpad":
        call["cache_leftpad"] = torch.tensor([3, 0, 11], **INT, device=device)
    if form == "pages":
        call["block_table"] = torch.randperm(rows, generator=torch.Generator().manual_seed(6)).int().view(3, -1)
        call["block_table"] = call["block_table"].to(device)
    if rotary:
        angles = torch.randn(LENGTH, DIM // 2, generator=torch.Generator().manual_seed(7)).to(device)
        call |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return call


def run(call: dict[str, Any]) -> list[torch.Tensor]:
    """The results of a call, and the cache after it; the call itself keeps its cache."""
    call = call | {name: call[name].clone() for name in ("k_cache", "v_cache")}
    return [*flash_attn_with_kvcache(**call), call["k_cache"], call["v_cache"]]


def in_float32(call: dict[str, Any]) -> dict[str, Any]:
    """The same numbers on the CPU."""
    moved = {name: each.cpu() if isinstance(each, torch.Tensor) else each for name, each in call.items()}
    half = ("q", "k_cache", "v_cache", "k", "v")
    return moved | {name: moved[name].float() for name in half}


@pytest.mark.parametrize("form", ["rows", "index", "leftpad", "pages"])
@pytest.mark.parametrize(("new", "rotary"), [(1, False), (1, True), (4, True)])
def test_half_precision(form: str, new: int, rotary: bool, device: str) -> None:
    """The first call, and the second, which looks up what the first one checked, have the results of float32."""
    call = cached(device, form, new, rotary)
    exact = run(in_float32(call))
    with torch.no_grad():
        first, second = run(call), run(call)
    for one, two, right in zip(first, second, exact, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one.cpu().float(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("new", [1, 4])
def test_graphs_and_streams_have_tables_of_their_own(new: int) -> None:
    """A graph reads its tables for as long as it lives, also when nothing else has them any more."""
    call = cached("cuda", "rows", new, True)
    right = run(call)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        beside = run(call)
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(call)
    page_tables._on_stream.cache_clear()
    junk = [torch.full((64,), -1, **INT, device="cuda") for _ in range(256)]  # takes memory that became free
    graph.replay()
    torch.cuda.synchronize()
    assert len(junk) == 256
    for results in (beside, captured):
        assert all(map(torch.equal, results, right))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """CPU tensors that say they are on a GPU; the names of the kernels that would run there."""
    kernels: list[str] = []
    gpu = torch.device("cuda", 0)
    real = page_tables._new

    def compiled(kernel: Any, *launch: Any) -> Any:
        name = kernel if isinstance(kernel, str) else kernel.__name__
        return lambda *addresses: kernels.append(name)

    for name, value in (("is_cpu", False), ("is_cuda", True), ("device", gpu)):
        monkeypatch.setattr(torch.Tensor, name, property(lambda _, value=value: value))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)
    monkeypatch.setattr(page_tables, "_new", lambda count, step, _, column: real(count, step, "cpu", column))
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, _real=torch.empty, **how: _real(*shape, **how))
    monkeypatch.setattr(plan, "device_name", lambda _: "sm90")
    monkeypatch.setattr(triton_launch, "_launch_compiled", compiled)
    monkeypatch.setattr(triton_launch, "_launches", {})
    monkeypatch.setattr(triton_splitkv, "_kernels", lambda: SimpleNamespace(attend="attend", merge="merge"))
    monkeypatch.setattr(triton_splitkv, "multiprocessors", lambda _: 132)
    caches = (triton_splitkv._settings, page_tables._on_stream)
    for each in caches:
        each.cache_clear()
    empty_plan_caches(programs=False)
    yield kernels
    monkeypatch.undo()
    for each in caches:
        each.cache_clear()
    empty_plan_caches(programs=False)


def test_a_seen_call_checks_nothing_again(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the launches of its kernels, and few functions: the checks by metadata would raise here."""
    call = cached("cpu", "rows", 1, False)
    more = cached("cpu", "pages", 4, True)
    theirs = {name: more[name] for name in ("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "causal")}
    theirs["page_table"] = more["block_table"]
    decode = {"q": call["q"], "k": call["k_cache"], "v": call["v_cache"], "kv_lengths": call["cache_seqlens"]}
    slots = torch.arange(4, dtype=torch.int64)
    pools, new = (more["k_cache"], more["v_cache"]), torch.zeros(4, HEADS[1], DIM, dtype=torch.bfloat16)
    pages = {"page_table": more["block_table"], "seqused_k": more["cache_seqlens"], "causal": True}
    calls = {
        "append attend": lambda: flash_attn_with_kvcache(**call),
        "rotate append attend": lambda: flash_attn_with_kvcache(**more),
        "append attend, FlashAttention 3": lambda: hopper.flash_attn_with_kvcache(**theirs),
        "attend, FlashAttention 4": lambda: cute.flash_attn_varlen_func(more["q"], *pools, **pages),
        "attend": lambda: attention(**decode, causal=True),
        "append": lambda: append_kv(*pools, new, new, slot_mapping=slots),
    }
    for each in calls.values():  # the first call of a kind finds its launches, the second one repeats them
        each(), each()
    for module in ("torch_frontend.flash_attn.frontend", "attn_core.dropins.flash_attn.cache"):
        monkeypatch.setattr(f"{module}.check_facts", None)
    for module in ("append.check_appended", "dense_caches._checked", "dense_caches.check_metadata"):
        monkeypatch.setattr(f"torch_frontend.paged.{module}", None)
    for name, each in calls.items():
        launched.clear()
        each()
        assert [kernel for kernel in launched if kernel != "merge"] == name.split(",")[0].split(), name
