"""Tests the fast path of eager paged calls whose metadata was seen before, on a GPU with stand-ins for its kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
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
from attn_core.backends.shared import triton as triton_launch
from attn_core.backends.triton_splitkv import backend as triton_splitkv
from torch_frontend import paged_attention
from torch_frontend.dispatch import plan
from torch_frontend.paged import seen_calls

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (attn_core, torch_frontend))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plans calls on CPU tensors for a GPU; a list of the kernels that are launched, and "new" before a search."""
    kernels: list[str] = []

    def compiled(kernel: str, grid: Any, arguments: Any, fixed: Any, constants: Any) -> Any:
        kernels.extend(("new", kernel))
        return lambda *addresses: kernels.append(kernel)

    find = seen_calls.seen_call.__wrapped__
    found = cache(lambda *key: find(*key)._replace(sizes=None))  # the tables of a GPU are not checked
    monkeypatch.setattr(seen_calls, "seen_call", found)
    monkeypatch.setattr(plan, "device_name", lambda device: "sm90")
    monkeypatch.setattr(triton_launch, "_launch_compiled", compiled)
    monkeypatch.setattr(triton_launch, "_launches", {})
    monkeypatch.setattr(triton_splitkv, "_kernels", lambda: SimpleNamespace(attend="attend", merge="merge"))
    monkeypatch.setattr(triton_splitkv, "_multiprocessors", lambda device: 132)
    caches = (triton_splitkv._settings, triton_splitkv._results)
    for each in caches:
        each.cache_clear()
    empty_plan_caches(programs=False)
    yield kernels
    for each in caches:
        each.cache_clear()
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
    return [e.name for e in record.function_events if e.name.startswith("aten::") and e.cpu_parent is None]


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
    # paged_attention, attend, the shortcut and its list of addresses; a pair as window is checked on every call.
    assert entered <= 4 + (name == "window pair")
