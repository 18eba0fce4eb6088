"""Merges any number of partial results in one launch of a Triton kernel, which reads and writes every tensor once.

This module imports triton, so it is imported only when a merge runs.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

ROWS = 16


# Triton compiles again if an integer becomes 1 or a multiple of 16. This one changes from call to call.
@triton.jit(do_not_specialize=["rows"])
def _merge(
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


def merge(parts: Any, part_lse: Any) -> tuple[Any, Any]:
    """Returns (out, lse) of dense ``[parts, batch, rows, heads, dim]`` and float32 ``[parts, batch, heads, rows]``."""
    import torch

    count, batch, rows, heads, dim = parts.shape
    out, lse = torch.empty_like(parts[0]), torch.empty_like(part_lse[0])
    if not lse.numel():
        return out, lse
    _merge[(triton.cdiv(rows, ROWS) * batch * heads,)](
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
        ROWS=ROWS,
    )
    return out, lse
