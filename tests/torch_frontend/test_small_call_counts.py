"""Tests how much a warm eager call on a CPU does around its kernel: torch operations, and Python calls of our own.

Small calls consist of little else. The counts are exact upper bounds, so a new operation or layer fails a test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from torch.autograd.profiler import profile

import attn_core
import torch_frontend
from torch_frontend import SeqInfo, append_kv, attention, paged_attention

FOLDERS = tuple(str(Path(package.__file__).parent) for package in (attn_core, torch_frontend))  # type: ignore[arg-type]
OF_NUMPY = ("aten::resolve_conj", "aten::resolve_neg", "aten::lift_fresh")
"""Operations without work, in conversions from and to numpy."""
Call = Callable[[], Any]


def made(name: str, requires_grad: bool = False) -> Call:
    """A tiny call of a kind: 8 tokens, 4 heads of 16 channels; 4 sequences in pages of 4 tokens."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 4, 16, requires_grad=requires_grad) for _ in range(3))
    rows = [tensor[0] for tensor in (q, k, v)]
    mask, bias, per_head = torch.rand(1, 1, 8, 8) > 0.2, torch.randn(1, 4, 8, 8), torch.rand(4)
    pools = [torch.randn(9, 4, 4, 16) for _ in range(2)]
    table, token = torch.arange(8, dtype=torch.int32).view(4, 2), torch.randn(4, 4, 16)
    equal, unequal = (torch.tensor(lengths, dtype=torch.int32) for lengths in ([8, 8, 8, 8], [8, 3, 4, 5]))
    pages: dict[str, Any] = {"block_table": table, "seq_lens": unequal}
    documents = {"equal": SeqInfo.from_lengths([4, 4]), "unequal": SeqInfo.from_lengths([3, 5])}
    offsets = torch.tensor([0, 3, 8], dtype=torch.int32)
    calls: dict[str, Call] = {
        "plain": lambda: attention(q, k, v),
        "causal": lambda: attention(q, k, v, causal=True),
        "lse": lambda: attention(q, k, v, return_lse=True),
        "window": lambda: attention(q, k, v, causal=True, window=3),
        "mask": lambda: attention(q, k, v, mask=mask),
        "mask and lse": lambda: attention(q, k, v, mask=mask, return_lse=True),
        "mask, causal": lambda: attention(q, k, v, mask=mask, causal=True),
        "bias": lambda: attention(q, k, v, bias=bias),
        "mask and bias": lambda: attention(q, k, v, mask=mask, bias=bias),
        "alibi": lambda: attention(q, k, v, alibi_slopes=per_head, causal=True),
        "sinks": lambda: attention(q, k, v, sinks=per_head),
        "softcap": lambda: attention(q, k, v, softcap=20.0),
        "softcap, causal": lambda: attention(q, k, v, softcap=20.0, causal=True),
        "documents of equal lengths": lambda: attention(*rows, seq_info=documents["equal"], causal=True),
        "two documents": lambda: attention(*rows, seq_info=documents["unequal"], causal=True),
        "two documents by tensors": lambda: attention(*rows, seq_info=(None, offsets, 5), causal=True),
        "pages, equal lengths": lambda: paged_attention(token, *pools, block_table=table, seq_lens=equal),
        "pages": lambda: paged_attention(token, *pools, **pages),
        "append": lambda: append_kv(*pools, token, token, **pages),
    }
    return calls[name]


def operations(call: Call) -> list[str]:
    """The torch operations that a call starts itself, in order; operations inside operations do not count."""
    with profile() as record:
        call()
    names = []
    for event in record.function_events:
        inside = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        if event.name.startswith("aten::") and not inside and event.name not in OF_NUMPY:
            names.append(event.name.removeprefix("aten::"))
    return names


def frames(call: Call) -> int:
    """How many Python functions of our packages a call enters; the fewest of three calls, as in ``operations``."""
    return min(_frames_of_one(call) for _ in range(3))


def _frames_of_one(call: Call) -> int:
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


BOUNDS: dict[str, tuple[int, int, int | None]] = {
    "plain": (5, 5, 5),
    "causal": (5, 5, 5),
    "lse": (5, 5, None),
    "window": (11, 12, 12),
    "mask": (12, 10, 10),
    "mask and lse": (15, 11, None),
    "mask, causal": (12, 13, 13),
    "bias": (12, 8, 8),
    "mask and bias": (13, 10, 10),
    "alibi": (17, 38, 39),
    "sinks": (19, 17, 18),
    "softcap": (32, 21, 22),
    "softcap, causal": (35, 21, 22),
    "documents of equal lengths": (22, 49, 50),
    "two documents": (36, 69, 70),
    "two documents by tensors": (41, 83, 84),
    "pages, equal lengths": (8, 9, None),
    "pages": (14, 13, None),
    "append": (5, 12, None),
}
"""Operations of each kind of call, and Python calls, without and with gradients; None for a kind without gradients.
Three are the lookup of a prepared call, its observers, its run."""


@pytest.mark.parametrize(
    ("name", "learns"), [(name, learns) for learns in (False, True) for name in BOUNDS if BOUNDS[name][1 + learns]]
)
def test_a_warm_forward_stays_within_its_counts(name: str, learns: bool) -> None:
    call = made(name, requires_grad=learns)
    for _ in range(3):
        call()
    started, entered = operations(call), frames(call)
    assert len(started) <= BOUNDS[name][0], started
    assert entered <= BOUNDS[name][1 + learns]  # type: ignore[operator]
