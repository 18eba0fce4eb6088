"""Triton kernels that merge partial results: one into another in place, or any number of them in one launch.

Each reads every tensor once and writes the result once. This module imports triton, so it is imported only when a merge
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from attn_core.backends.shared.readable import dense_channels, readable
from attn_core.backends.shared.triton import Description, launch

if TYPE_CHECKING:
    from torch import Tensor


ROWS = 32
"""The rows that a program of ``_merge`` merges."""
ROWS_OF_PARTS = 16
"""The same of ``_merge_parts``."""


@triton.jit
def _merge(
    out,
    lse,
    part_out,
    part_lse,
    new_lse,
    rows,
    heads,
    out_batch,
    out_row,
    out_head,
    lse_batch,
    lse_head,
    lse_row,
    part_batch,
    part_row,
    part_head,
    part_lse_batch,
    part_lse_head,
    part_lse_row,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges ROWS rows of one head. WIDE is a power of two, at least DIM. Offsets are 64-bit.

    The new log-sum-exp goes to a separate dense buffer, because several warps read each row's old value, and one warp
    may finish before another starts.
    """
    blocks = (rows + ROWS - 1) // ROWS
    batch_head = tl.program_id(0) // blocks  # all on the first axis of the grid, because the others end at 65535
    batch = (batch_head // heads).to(tl.int64)
    head = (batch_head % heads).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    old = tl.load(lse + batch * lse_batch + head * lse_head + row * lse_row, mask=inside, other=0.0)
    new = tl.load(part_lse + batch * part_lse_batch + head * part_lse_head + row * part_lse_row, mask=inside, other=0.0)
    larger = tl.maximum(old, new)
    # If neither result saw a key, -inf - -inf would be NaN. With 0, both weights are 0.
    larger = tl.where(larger == -float("inf"), 0.0, larger)
    weight, part_weight = tl.exp(old - larger), tl.exp(new - larger)
    total = weight + part_weight
    share = 1.0 / tl.where(total == 0.0, 1.0, total)  # 0 / 0 would be NaN; both results are 0 in such a row
    tl.store(new_lse + batch_head.to(tl.int64) * rows + row, larger + tl.log(total), mask=inside)
    channel = tl.arange(0, WIDE)
    mask = inside[:, None] & (channel < DIM)[None, :]
    # The last axis needs no stride: it is dense, if need be by the copy in ``merge``.
    of_out = out + batch * out_batch + head * out_head + row[:, None] * out_row + channel[None, :]
    of_part = part_out + batch * part_batch + head * part_head + row[:, None] * part_row + channel[None, :]
    before = tl.load(of_out, mask=mask, other=0.0).to(tl.float32)
    part = tl.load(of_part, mask=mask, other=0.0).to(tl.float32)
    merged = (weight * share)[:, None] * before + (part_weight * share)[:, None] * part
    tl.store(of_out, merged, mask=mask)


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """``tiles.merge`` for float32 ``lse`` on a GPU; the last axis of ``out`` must be dense."""
    part_out = readable(part_out, dense_channels)
    batch, rows, heads, _ = out.shape
    # There is nothing to launch, and ``tl.arange`` takes no width of 0.
    if not out.numel():
        return
    tensors = (out, lse, part_out, part_lse, lse.new_empty((batch, heads, rows)))
    strides = [each.stride() for each in tensors[:4]]
    dtypes = [each.dtype for each in tensors]
    key = ("merge", out.shape, *strides, *dtypes, out.device)
    launch(_merge, key, tensors, lambda: _describe(out.shape, strides))
    lse.copy_(tensors[4])


def _describe(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> Description:
    """Returns the grid, the numbers behind the tensors, and the constants of ``_merge``."""
    batch, rows, heads, dim = shape
    numbers = (rows, heads, *(step for steps in strides for step in steps[:3]))
    constants = {"DIM": dim, "WIDE": triton.next_power_of_2(dim), "ROWS": ROWS}
    return (triton.cdiv(rows, ROWS) * batch * heads, 1, 1), numbers, constants


# Triton compiles again if an integer becomes 1 or a multiple of 16. This one changes from call to call.
@triton.jit(do_not_specialize=["rows"])
def _merge_parts(
    parts,
    part_lse,
    out,
    lse,
    rows,
    heads,
    part_stride,
    part_batch,
    part_row,
    part_head,
    lse_stride,
    PARTS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merges ROWS rows of one head. WIDE is a power of two, at least DIM.

    parts ``[PARTS, batch, rows, heads, DIM]`` and out are dense and alike, and so are part_lse ``[PARTS, batch, heads,
    rows]`` and lse.
    """
    blocks = (rows + ROWS - 1) // ROWS
    batch_head = (tl.program_id(0) // blocks).to(tl.int64)  # all on the first axis, because the others end at 65535
    batch = batch_head // heads
    head = batch_head % heads
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at_lse = batch_head * rows + row
    top = tl.full([ROWS], float("-inf"), tl.float32)
    scores = part_lse + at_lse
    for _ in range(PARTS):
        top = tl.maximum(top, tl.load(scores, mask=inside, other=float("-inf")))
        scores += lse_stride
    # If no part saw a key, -inf - -inf would be NaN. With 0, all weights are 0.
    base = tl.where(top == -float("inf"), 0.0, top)
    channel = tl.arange(0, WIDE)
    mask = inside[:, None] & (channel < DIM)[None, :]
    place = batch * part_batch + row[:, None] * part_row + head * part_head + channel[None, :]
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, WIDE], tl.float32)
    scores = part_lse + at_lse
    values = parts + place
    for _ in range(PARTS):
        weight = tl.exp(tl.load(scores, mask=inside, other=float("-inf")) - base)
        value = tl.load(values, mask=mask, other=0.0).to(tl.float32)
        # 0 * NaN is NaN, so what an empty part left in its output must go.
        summed += tl.where(weight[:, None] == 0.0, 0.0, value * weight[:, None])
        total += weight
        scores += lse_stride
        values += part_stride
    summed /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + place, summed.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + at_lse, base + tl.log(total), mask=inside)


def merge_parts(parts: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of dense ``[parts, batch, rows, heads, dim]`` and float32 ``[parts, batch, heads, rows]``."""
    import torch

    count, batch, rows, heads, dim = parts.shape
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    if not lse.numel():
        return out, lse
    _merge_parts[(triton.cdiv(rows, ROWS_OF_PARTS) * batch * heads,)](
        parts,
        part_lse,
        out,
        lse,
        rows,
        heads,
        parts.stride(0),
        rows * heads * dim,
        heads * dim,
        dim,
        batch * heads * rows,
        PARTS=count,
        DIM=dim,
        WIDE=triton.next_power_of_2(max(dim, 1)),
        ROWS=ROWS_OF_PARTS,
    )
    return out, lse
