"""Tests the fast path of eager paged calls whose metadata was seen before, on a GPU with stand-ins for its kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from frameworks import empty_plan_caches
from torch.autograd.profiler import profile

import attn_core
import torch_frontend
from attn_core.backends import triton_splitkv
from attn_core.backends.shared import triton as triton_launch
from attn_core.errors import SpecError
from torch_frontend import append_kv, paged_attention
from torch_frontend.dispatch import plan, prepared
from torch_frontend.paged import paged_calls

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (attn_core, torch_frontend))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans calls on CPU tensors for a GPU; a list of the kernels that are launched, and "new" before a search."""
    kernels: list[str] = []

    def compiled(kernel: str, grid: Any, arguments: Any, fixed: Any, constants: Any) -> Any:
        kernels.extend(("new", kernel))
        return lambda *addresses: kernels.append(kernel)

    build = paged_calls._runner
    # The tables of a GPU are not checked.
    monkeypatch.setattr(paged_calls, "_runner", lambda plan, shortcut, sizes: build(plan, shortcut, None))
    monkeypatch.setattr(prepared, "_are_readable", lambda *_: True)
    monkeypatch.setattr(plan, "device_name", lambda device: "sm90")
    monkeypatch.setattr(triton_launch, "_launch_compiled", compiled)
    monkeypatch.setattr(triton_launch, "_launches", {})
    monkeypatch.setattr(triton_splitkv, "_kernels", lambda: SimpleNamespace(attend="attend", merge="merge"))
    monkeypatch.setattr(triton_splitkv, "multiprocessors", lambda device: 132)
    triton_splitkv._settings.cache_clear()
    empty_plan_caches(programs=False)
    yield kernels
    triton_splitkv._settings.cache_clear()
    empty_plan_caches(programs=False)


def decode(**options: Any) -> Callable[[], Any]:
    """A decoding call of 8 sequences in bfloat16."""
    pools = [torch.zeros(16, 256, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    table, lengths = torch.arange(16, dtype=torch.int32).view(8, 2), torch.full((8,), 300, dtype=torch.int32)
    q = torch.zeros(8, 8, 128, dtype=torch.bfloat16)
    return lambda: paged_attention(q, *pools, block_table=table, seq_lens=lengths, **options)


def operations(call: Callable[[], Any]) -> list[str]:
    with profile() as record:
        call()
    outside = [e for e in record.function_events if e.cpu_parent is None or e.cpu_parent.name.startswith("attn.")]
    return [e.name for e in outside if e.name.startswith("aten::")]


def frames(call: Callable[[], Any]) -> int:
    """How many Python functions of our packages a call enters."""
    number = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal number
        number += event == "call" and frame.f_code.co_filename.startswith(FOLDERS)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return number


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "by name": {"backend": "triton_splitkv"},
    "bound": {"max_len_q": 1},
    "window": {"window": 100},
    "window pair": {"window": (100, 0), "softcap": 5.0},
    "sinks": {"sinks": torch.zeros(8, dtype=torch.bfloat16)},
    "lse": {"return_lse": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_a_seen_call_does(name: str, launched: list[str]) -> None:
    """Two launches, an allocation for each result and one for everything else, and few Python functions."""
    options = OPTIONS[name]
    call = decode(**options)
    call()
    splits = 2 if "merge" in launched else 1
    assert launched == [word for kernel in ("attend", "merge")[:splits] for word in ("new", kernel)]
    launched.clear()
    started, entered = operations(call), frames(call)
    assert launched == 2 * ["attend", "merge"][:splits]
    assert started == ["aten::empty_like", "aten::empty"] + ["aten::empty"] * ("return_lse" in options)
    # paged_attention, attend, find, is_observed, run, the shortcut and its list of addresses; a pair as window is
    # checked on every call.
    assert entered <= 7 + (name == "window pair")


def drafts() -> Callable[[], Any]:
    """A step of 8 sequences with two queries each."""
    pools = [torch.zeros(16, 256, 2, 128, dtype=torch.bfloat16) for _ in range(2)]
    table, lengths = torch.arange(16, dtype=torch.int32).view(8, 2), torch.full((8,), 300, dtype=torch.int32)
    q, cu = torch.zeros(16, 8, 128, dtype=torch.bfloat16), torch.arange(0, 17, 2, dtype=torch.int32)
    return lambda: paged_attention(q, *pools, block_table=table, seq_lens=lengths, cu_seqlens_q=cu, max_len_q=2)


def quantised() -> Callable[[], Any]:
    """A decoding call of 8 sequences on int8 pages."""
    pools = [torch.zeros(16, 256, 2, 128, dtype=torch.int8) for _ in range(2)]
    scales = [torch.ones(16, 256, 2) for _ in range(2)]
    table, lengths = torch.arange(16, dtype=torch.int32).view(8, 2), torch.full((8,), 300, dtype=torch.int32)
    q = torch.zeros(8, 8, 128, dtype=torch.bfloat16)
    tables = {"block_table": table, "seq_lens": lengths, "k_scales": scales[0], "v_scales": scales[1]}
    return lambda: paged_attention(q, *pools, **tables)


@pytest.mark.parametrize("make", [drafts, quantised])
def test_offsets_and_scales_take_the_short_way(make: Callable[[], Any], launched: list[str]) -> None:
    call = make()
    call()
    kernels = [word for word in launched if word != "new"]
    assert kernels and launched == [word for kernel in kernels for word in ("new", kernel)]
    launched.clear()
    started, entered = operations(call), frames(call)
    assert launched == 2 * kernels
    assert started == ["aten::empty_like", "aten::empty"]
    assert entered <= 7


def appended(**options: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """An append to 4 sequences on the CPU, and its pools; keyword arguments replace its tensors."""
    pools = [torch.zeros(8, 4, 2, 16) for _ in range(2)]
    table, lengths = torch.arange(8, dtype=torch.int32).view(4, 2), torch.tensor([1, 4, 5, 8], dtype=torch.int32)
    new = torch.randn(4, 2, 16)

    def call(**others: Any) -> Any:
        given = {
            "k_pages": pools[0],
            "v_pages": pools[1],
            "k": new,
            "v": new,
            "block_table": table,
            "seq_lens": lengths,
        }
        return append_kv(**{**given, **options, **others})

    return call, pools


def test_what_a_seen_append_does() -> None:
    call, _ = appended()
    for _ in range(2):
        call()
    # Conversions from and to numpy and lists start operations without work.
    started = [name for name in operations(call) if "resolve" not in name and name != "aten::lift_fresh"]
    assert started == ["aten::unbind", "aten::index_put_", "aten::index_put_"]
    assert frames(call) <= 12


INT: Any = {"dtype": torch.int32}
EQUAL = torch.full((4,), 4, **INT)
WRONG: dict[str, dict[str, Any]] = {
    "k requires a gradient": {"k": torch.zeros(4, 2, 16, requires_grad=True)},
    "the pool requires a gradient": {"v_pages": torch.zeros(8, 4, 2, 16, requires_grad=True)},
    "a length beyond the table": {"seq_lens": torch.tensor([1, 4, 5, 9], **INT)},
    "no room for the new token": {"seq_lens": torch.tensor([1, 4, 5, 0], **INT)},
    "a page outside the pool": {"block_table": torch.tensor([[0, 1], [2, 3], [4, 8], [6, 7]], **INT)},
    "a negative page": {"block_table": torch.tensor([[0, 1], [2, 3], [4, -1], [6, 7]], **INT)},
    "one slot twice": {"block_table": torch.tensor([[0, 1], [2, 3], [2, 3], [6, 7]], **INT), "seq_lens": EQUAL},
    "a sparse k": {"k": torch.zeros(4, 2, 16).to_sparse()},
    "a meta pool": {"k_pages": torch.zeros(8, 4, 2, 16, device="meta")},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_seen_append_is_still_checked(name: str) -> None:
    call, pools = appended()
    call()
    before = [pool.clone() for pool in pools]
    with pytest.raises(SpecError):
        call(**WRONG[name])
    assert all(map(torch.equal, pools, before)), "something was written"


def test_a_seen_decoding_call_is_still_checked() -> None:
    q, pools = torch.zeros(4, 4, 16), [torch.zeros(8, 4, 2, 16) for _ in range(2)]
    right: dict[str, Any] = {"k_pages": pools[0], "v_pages": pools[1], "q": q, "max_len_q": 1, "window": (1, 0)}
    right |= {"block_table": torch.arange(8, **INT).view(4, 2), "seq_lens": EQUAL + 1}
    paged_attention(**right)
    wrong = {name: case for name, case in WRONG.items() if not {"k", "v"} & set(case)}
    wrong |= {
        "q requires a gradient": {"q": q.clone().requires_grad_()},
        "a bool as bound": {"max_len_q": True},
        "a float in the window": {"window": (1.0, 0)},
        "a bool in the window": {"window": (True, 0)},
        "a number as flag": {"causal": 1},
    }
    del wrong["one slot twice"], wrong["no room for the new token"]  # right for reading
    for name, case in wrong.items():
        with pytest.raises(SpecError):
            paged_attention(**{**right, **case})
            pytest.fail(f"accepted {name}")
    paged_attention(**{**right, "seq_lens": EQUAL * 0})
