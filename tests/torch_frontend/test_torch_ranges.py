"""Tests the ranges of torch calls: what torch.profiler and NVTX get, and that no range is made without a listener."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from observed_calls import leave_one_rank, one_rank
from torch.profiler import ProfilerActivity, profile

import attn_core
from attn_core import backends
from attn_core.backends.shared.torch_ranges import Range, in_range_if_on
from attn_core.call.observe import range_name
from attn_core.call.spec import AttentionSpec
from torch_frontend import SeqInfo, attention, attention_qkvpacked, context_parallel_attention, paged_attention
from torch_frontend.diffusers import installed
from torch_frontend.dispatch import plan, run_plan
from torch_frontend.module import Attention
from torch_frontend.recomputed import attention_of_layer

Tensor = torch.Tensor
SIZES = "b2 q7 kv7 h4:2 d16 f32"
ROW = "b1 q14 kv14 h4:2 d16 f32"
PAGES = {
    "block_table": torch.tensor([[2, 0], [1, -1]], dtype=torch.int32),
    "seq_lens": torch.tensor([6, 3], dtype=torch.int32),
}


def operands(learns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, heads, 16, requires_grad=learns) for heads in (4, 2, 2))
    return q, k, v


def rows(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)


def heads(*tensors: Tensor) -> list[Tensor]:
    return [tensor.transpose(1, 2) for tensor in tensors]


def in_place(*tensors: Tensor) -> Tensor:
    with installed():
        return torch.nn.functional.scaled_dot_product_attention(*heads(*tensors), is_causal=True, enable_gqa=True)


def layer(q: Tensor, *_: Tensor) -> Tensor:
    return LAYER(q.flatten(2))  # type: ignore[no-any-return]


LAYER = Attention(4, in_features=64, causal=True)
DOCUMENTS = SeqInfo.from_lengths([6, 8])
MASK, BIAS = torch.ones(2, 1, 1, 7, dtype=torch.bool), torch.zeros(1, 4, 7, 7)
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "plain": (lambda q, k, v: attention(q, k, v), f"attn.sdpa_flash * {SIZES}"),
    "causal": (lambda q, k, v: attention(q, k, v, causal=True), f"attn.sdpa_flash * {SIZES} causal"),
    "window": (lambda q, k, v: attention(q, k, v, causal=True, window=3), f"attn.sdpa_flash * {SIZES} causal w3"),
    "math": (lambda q, k, v: attention(q, k, v, backend="math"), f"attn.math * {SIZES}"),
    "softcap": (lambda q, k, v: attention(q, k, v, softcap=5.0), f"attn.math * {SIZES} softcap5"),
    "lse": (lambda q, k, v: attention(q, k, v, return_lse=True, backend="math")[0], f"attn.math * {SIZES}"),
    "mask": (lambda q, k, v: attention(q, k, v, mask=MASK), f"attn.sdpa_flash * {SIZES} mask"),
    "mask and bias": (lambda q, k, v: attention(q, k, v, mask=MASK, bias=BIAS), f"attn.sdpa_flash * {SIZES} mask bias"),
    "slopes": (
        lambda q, k, v: attention(q, k, v, alibi_slopes=torch.ones(4), causal=True),
        f"attn.sdpa_flash * {SIZES} causal alibi",
    ),
    "documents": (
        lambda *tensors: attention(*rows(*tensors), seq_info=DOCUMENTS),
        f"attn.sdpa_flash * {ROW} docs2",
    ),
    "dropout": (lambda q, k, v: attention(q, k, v, dropout=0.5), f"attn.math * {SIZES} dropout0.5"),
    "heads first": (
        lambda *tensors: attention(*heads(*tensors), layout="bhsd", causal=True),
        f"attn.sdpa_flash * {SIZES} causal",
    ),
    "heads first, mask": (
        lambda *tensors: attention(*heads(*tensors), layout="bhsd", mask=MASK),
        f"attn.sdpa_flash * {SIZES} mask",
    ),
    "torch's place": (in_place, f"attn.sdpa_flash * {SIZES} causal top_left"),
    "one tensor": (
        lambda q, *_: attention_qkvpacked(torch.stack((q, q, q), 2), backend="math"),
        "attn.math * b2 q7 kv7 h4:4 d16 f32",
    ),
    "layer": (layer, "attn.sdpa_flash * b2 q7 kv7 h4:4 d16 f32 causal"),
}
every_call = pytest.mark.parametrize("name", CALLS)


def names_of(run: Callable[[], Any]) -> list[str]:
    """The ranges that torch.profiler sees, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        run()
    events = [event for event in record.events() or () if event.name.startswith("attn.")]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


def train(name: str, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output and the gradients of a call."""
    torch.manual_seed(1)
    out = CALLS[name][0](*tensors)
    used = [tensor for tensor in tensors if tensor.requires_grad]
    gradients = torch.autograd.grad(out.square().sum(), used, allow_unused=True)
    return out.detach(), *(each for each in gradients if each is not None)


@every_call
def test_torch_profiler_sees_both_directions_and_changes_no_bit(name: str) -> None:
    expected, seen = train(name, operands()), []
    names = names_of(lambda: seen.extend(train(name, operands())))
    assert names == [CALLS[name][1].replace("*", direction) for direction in ("forward", "backward")]
    for actual, desired in zip(seen, expected, strict=True):
        assert torch.equal(actual, desired)


@every_call
def test_torch_profiler_sees_a_call_without_gradients(name: str) -> None:
    with torch.no_grad():
        seen = names_of(lambda: CALLS[name][0](*operands(learns=False)))
    assert seen == [CALLS[name][1].replace("*", "forward")]


@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 1, 2], dtype=torch.int32)])
def test_torch_profiler_and_nvtx_see_pages(offsets: Tensor | None, nvtx: list[str]) -> None:
    q, pool = torch.randn(2, 4, 16), torch.randn(3, 4, 2, 16)
    call: dict[str, Any] = PAGES if offsets is None else PAGES | {"cu_seqlens_q": offsets, "max_len_q": 1}
    name = "attn.sdpa_flash forward b1 q2 kv8 h4:2 d16 f32 causal docs2 pages4"
    assert names_of(lambda: paged_attention(q, pool, pool, **call)) == [name]
    with attn_core.ranges(True):
        paged_attention(q, pool, pool, **call)
    assert nvtx == [name, "pop"]


@pytest.mark.parametrize("backend", ["sdpa_flash", "math"])
def test_compiled_code_has_ranges_and_no_graph_break(backend: str) -> None:
    def loss(*tensors: Tensor) -> Tensor:
        return attention(*tensors, causal=True, backend=backend).sum()

    compiled, tensors = torch.compile(loss, fullgraph=True, backend="aot_eager"), operands()
    compiled(*tensors).backward()
    seen = names_of(lambda: compiled(*tensors).backward())
    assert seen == [f"attn.{backend} {direction} {SIZES} causal" for direction in ("forward", "backward")]


def test_a_program_compiles_while_somebody_listens(nvtx: list[str]) -> None:
    compiled, tensors = torch.compile(attention, fullgraph=True, backend="aot_eager"), operands()
    with attn_core.ranges(True):
        seen = names_of(lambda: compiled(*tensors, causal=True, window=2))
    assert seen == [f"attn.sdpa_flash forward {SIZES} causal w2"] == nvtx[:1]


def test_a_recomputed_pass_is_a_forward() -> None:
    def step() -> None:
        run = torch.utils.checkpoint.checkpoint(attention, *operands(), use_reentrant=False)
        run.sum().backward()

    # Torch recomputes once the kernel's backward asks for its saved tensors, so inside of the backward's range.
    names = [f"attn.sdpa_flash {direction} {SIZES}" for direction in ("forward", "backward", "forward")]
    assert names_of(step) == names
    with torch.no_grad():
        assert names_of(lambda: attention_of_layer(*operands(), trains=True)) == names[:1]


# Nobody listens


@every_call
def test_without_a_listener_no_range_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a range without a listener")

    monkeypatch.setattr(Range, "__init__", fail)
    monkeypatch.setattr(run_plan, "_wrapped", fail)
    train(name, operands())
    with pytest.raises(AssertionError, match="a range without a listener"), profile():
        train(name, operands())


def test_without_a_listener_the_plan_is_the_same_object() -> None:
    q, k, v = operands()
    options = attn_core.call.options.check_options(attn_core.call.options.Options())
    call_plan = plan.plan(plan.metadata(attn_core.call.tensors.Inputs(q, k, v)), options, True, False, None)
    assert run_plan.in_ranges(call_plan) is call_plan
    with attn_core.ranges(True):
        listened = run_plan.in_ranges(call_plan)
        assert listened is not call_plan and run_plan.in_ranges(call_plan) is listened
        assert listened._replace(**{name: getattr(call_plan, name) for name in FUNCTIONS}) == call_plan
    with profile():
        assert run_plan.in_ranges(call_plan) is not call_plan
    assert run_plan.in_ranges(call_plan) is call_plan


FUNCTIONS = ("forward", "backward", "shortcut")


# NVTX


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The calls of torch.cuda.nvtx: names of ranges, and "pop"."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    yield calls


@every_call
def test_nvtx_gets_both_directions_if_ranges_are_on(name: str, nvtx: list[str]) -> None:
    train(name, operands())
    assert not nvtx
    with attn_core.ranges(True):
        train(name, operands())
    forward, backward = (CALLS[name][1].replace("*", direction) for direction in ("forward", "backward"))
    assert nvtx == [forward, "pop", backward, "pop"]


@pytest.mark.parametrize("backend", ["sdpa_flash", "math"])
def test_the_backward_on_another_thread_has_its_range(backend: str, nvtx: list[str]) -> None:
    """As on a GPU, whose backwards run on a thread of autograd, and after the block of the switch."""
    with attn_core.ranges(True):
        loss = attention(*operands(), backend=backend).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert nvtx[2:] == [f"attn.{backend} backward {SIZES}", "pop"]


class KernelError(Exception):
    pass


def fail(*_: Any, **__: Any) -> Any:
    raise KernelError


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_kernel_that_raises_ends_its_range(direction: str, nvtx: list[str], replace_fields: Any) -> None:
    replace_fields(backends.load("math", "cpu"), **{direction: fail})
    with attn_core.ranges(True), pytest.raises(KernelError):
        attention(*operands(), backend="math").sum().backward()
    assert nvtx[-2].startswith(f"attn.math {direction}") and nvtx.count("pop") * 2 == len(nvtx)


def test_a_backward_of_torch_that_raises_ends_its_range_with_the_next(nvtx: list[str]) -> None:
    with attn_core.ranges(True):
        q, k, v = operands()
        out = attention(q, k, v)
        kernel = out.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        kernel.register_prehook(fail)  # after the prehook that starts the range
        with pytest.raises(KernelError):
            out.sum().backward()
        assert nvtx[2:] == [f"attn.sdpa_flash backward {SIZES}"]
        del nvtx[:]
        attention(q, k, v).sum().backward()
    assert nvtx == [f"attn.sdpa_flash forward {SIZES}", "pop", "pop", f"attn.sdpa_flash backward {SIZES}", "pop"]


def test_a_build_without_nvtx_warns_and_runs() -> None:
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this build has NVTX")
    tensors = operands(learns=False)
    with attn_core.ranges(True), pytest.warns(UserWarning, match="this build of torch has no NVTX"):
        actual = attention(*tensors)
    assert torch.equal(actual, attention(*tensors))


# Tiles of context parallelism


def test_a_tile_is_a_range_whenever_somebody_listens(nvtx: list[str]) -> None:
    sizes = {"q_len": 7, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 16}
    spec = AttentionSpec(batch=2, dtype="float32", **sizes)
    run, name = in_range_if_on(lambda spec, one, two: one + two, "math", "forward"), range_name("math", spec, "forward")
    assert run(spec, 2, 3) == 5 and not nvtx
    assert names_of(lambda: run(spec, 2, 3)) == [name]
    with attn_core.ranges(True):
        assert run(spec, 2, 3) == 5
    assert nvtx == [name, "pop"]


def test_context_parallelism_has_a_range_for_each_tile(nvtx: list[str]) -> None:
    q, k, v = (torch.randn(1, 64, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    sizes = "b1 q64 kv64 h4:2 d16 f32 causal partial"
    forward, backward = (f"attn.sdpa_flash {direction} {sizes}" for direction in ("forward", "backward"))
    try:
        call = partial(context_parallel_attention, q, k, v, mesh=one_rank(), causal=True)
        with attn_core.ranges(True):
            loss = call().sum()
        loss.backward()
        assert nvtx == [forward, "pop", backward, "pop"]
        assert names_of(lambda: call().sum().backward()) == [forward, backward]
    finally:
        leave_one_rank()
