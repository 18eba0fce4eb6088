"""Tests which tensors each kernel's rule lets through, and how often the backends of a CPU copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import attn_core
import torch_frontend
from attn_core.backends import triton_ordered
from attn_core.backends.flex import operands as flex
from attn_core.backends.sdpa_efficient import operands as sdpa_efficient
from attn_core.backends.sdpa_flash import cpu as sdpa_flash
from attn_core.backends.shared.readable import Rule, dense_channels, readable, readable_rows, whole_vectors, writable

BATCH, LENGTH, HEADS, DIM = 2, 6, 4, 32
WHOLE = torch.arange(2 * BATCH * LENGTH * HEADS * DIM * 3).bfloat16().view(2 * BATCH, LENGTH, HEADS, 3 * DIM)

LAYOUTS: dict[str, Any] = {
    "contiguous": WHOLE[..., :DIM].contiguous(),
    "heads first": WHOLE[..., :DIM].transpose(1, 2).contiguous().transpose(1, 2),
    "part of wide rows": WHOLE[..., DIM : 2 * DIM],
    "every second token": WHOLE[:, ::2, :, :DIM],
    "rows of 33": WHOLE.view(-1)[: 2 * BATCH * LENGTH * HEADS * 33].view(2 * BATCH, LENGTH, HEADS, 33)[..., :DIM],
    "steps of 8": WHOLE.as_strided((BATCH, LENGTH, HEADS, DIM), (1200, 200, 40, 1)),
    "address of 2": WHOLE.view(-1)[1 : 1 + BATCH * LENGTH * HEADS * DIM].view(BATCH, LENGTH, HEADS, DIM),
    "every second channel": WHOLE[..., : 2 * DIM : 2],
    "expanded heads": WHOLE[:, :, :1, :DIM].expand(-1, -1, HEADS, -1),
    "overlapping tokens": WHOLE.as_strided((BATCH, LENGTH, HEADS, DIM), (2000, DIM // 2, 400, 1)),
}
RULES: dict[str, tuple[Rule, set[str]]] = {
    "whole_vectors": (
        whole_vectors,
        {"rows of 33", "address of 2", "every second channel", "expanded heads"},
    ),
    "dense_channels": (dense_channels, {"every second channel"}),
    "sdpa_flash on a CPU": (
        sdpa_flash._has_rows,
        {"every second channel", "expanded heads", "overlapping tokens"},
    ),
    "sdpa_efficient": (
        sdpa_efficient.is_addressable,
        {"rows of 33", "address of 2", "every second channel", "expanded heads"},
    ),
    "triton_ordered": (
        triton_ordered._in_sixteens,
        {"rows of 33", "steps of 8", "every second channel"},
    ),
}
"""By kernel, its rule and the layouts that are copied."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", RULES)
def test_only_tensors_that_the_kernel_cannot_read_are_copied(kernel: str, layout: str) -> None:
    (rule, copied), tensor = RULES[kernel], LAYOUTS[layout]
    attn_core.counters(reset=True)
    read = readable(tensor, rule)
    assert (read is not tensor) == (layout in copied)
    assert attn_core.counters()["copies"]["operand"] == (layout in copied)
    assert torch.equal(read, tensor) and rule(read)
    assert read is tensor or (read.is_contiguous() and read.data_ptr() % 16 == 0)
    assert all(one is read or torch.equal(one, tensor) for one in readable_rows(tensor, tensor, tensor, rule))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_buffer_is_written_if_it_could_be_read(layout: str) -> None:
    buffer = LAYOUTS[layout]
    assert writable(buffer) is (buffer if whole_vectors(buffer) else None)
    assert writable(None) is None


def test_strides_of_axes_of_length_1_do_not_matter() -> None:
    one = WHOLE[:1, :1].as_strided((1, 1, HEADS, DIM), (0, 3, 3 * DIM, 1))
    assert readable(one) is one


def test_a_tensor_that_reaches_too_far_is_copied_unless_it_is_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_efficient, "ADDRESSES", LENGTH * HEADS * DIM)
    for layout, tensor in LAYOUTS.items():
        read = readable(tensor, sdpa_efficient.is_addressable)
        assert (read is tensor) == (layout in {"contiguous", "heads first", "overlapping tokens"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_copies_what_no_program_is_compiled_for(layout: str) -> None:
    tensor = LAYOUTS[layout]
    read, _ = flex.arrange(tensor)
    assert (read is not tensor) == (layout in set(LAYOUTS) - {"contiguous", "heads first", "address of 2"})
    assert torch.equal(read, tensor)


COPIES: dict[str, Callable[[str], int]] = {
    "sdpa_flash": lambda layout: 3 * (layout in RULES["sdpa_flash on a CPU"][1]),
    "math": lambda layout: 0,
    "flex": lambda layout: 0,
}
"""By backend, how many of q, k and v a call on a CPU copies by ``readable``."""


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", COPIES)
def test_calls_on_a_cpu_copy_no_more_than_they_must(backend: str, layout: str) -> None:
    tensor = LAYOUTS[layout]
    expected = torch_frontend.attention(*[tensor.contiguous()] * 3, backend=backend)
    for _ in range(2):  # the second call repeats the first one
        attn_core.counters(reset=True)
        out = torch_frontend.attention(tensor, tensor, tensor, backend=backend)
        assert attn_core.counters()["copies"]["operand"] == COPIES[backend](layout)
        assert torch.equal(out, expected)
