"""The scores of a block in torch operations: scale, softcap, score function, bias, ALiBi, and what is hidden.

Scores are ``[batch, kv_heads, group, rows, keys]``.
"""

from __future__ import annotations

import math
from typing import Any

from attn_core.backends.shared.parts.row_blocks import RowBlock
from attn_core.backends.shared.plain.block_operands import BlockOperands, heads_first
from attn_core.backends.shared.plain.contained_sums import products
from attn_core.call.functions import slope
from attn_core.call.key_ranges import contains
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import part_of
from attn_core.expressions.on_torch import evaluate_torch


def scores_and_top(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, keep: bool = False
) -> tuple[Any, list[Any], Any, Any, Any, Any]:
    """Returns ``scores_of``, the largest score of each row, which rows see no key, and which overflowed; None for none.

    A row overflows if all of its scores are too large to be multiplied by the unit. The caller computes these rows
    again with the unit 1. Off the CPU, to look at the scores would wait for the device; see ``operands_of``.
    """
    import torch

    scores, slopes, hidden = scores_of(spec, operands, block, hidden_in(spec, operands, block), keep)
    top, overflowed = scores.amax(dim=-1, keepdim=True), None
    if top.is_cpu and type(top) is torch.Tensor:  # a fake tensor has no values to look at
        if (hidden is None and operands.bounded) or math.isfinite(top.sum()):
            return scores, slopes, hidden, top, None, None
        if operands.unit != 1.0:
            overflowed = top.isinf() if hidden is None else top.isinf() & ~hidden.all(dim=-1, keepdim=True)
            overflowed = overflowed if overflowed.any() else None
    return scores, slopes, hidden, top, None if hidden is None else top == -torch.inf, overflowed


def scores_of(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, hidden: Any, keep: bool = False
) -> tuple[Any, list[Any], Any]:
    """Returns the scores, -inf where hidden, what their gradient is multiplied by in turn, and what is hidden.

    The factors are the slopes of score function and softcap; without ``keep`` there are none. A score function may hide
    more pairs. The scores are multiplied by ``operands.unit``. The caller may overwrite them.
    """
    import torch

    unit = operands.unit
    cap, slopes, factor = spec.softcap, [], unit if spec.score_mod is None else 1.0
    q = heads_first(spec, operands.q, block, operands.k.dtype) * factor_of(spec, unit)
    scores = scratch_products(operands, "scores", q, keys_in(operands.k, block).mT)
    if cap is not None:
        tanh = scores.tanh_()
        scores = tanh * (cap * factor) if keep else tanh.mul_(cap * factor)
        slopes = [1.0 - tanh.square()] if keep else []
    if spec.score_mod is not None:
        places = places_of(spec, operands, block)
        capped, scores = scores, evaluate_torch(spec.score_mod, places, scores, operands.aux)
        scores = scores.expand(capped.shape).clone() if scores is capped or scores.shape != capped.shape else scores
        if keep:
            slopes.insert(0, evaluate_torch(slope(spec.score_mod), places, capped, operands.aux))
        excluded = scores == float("-inf")
        hidden = excluded if hidden is None else excluded | hidden
        scores = scores if unit == 1.0 else scores.mul_(unit)
    # Sums that overflow are looked at only where they may: after an overflow on a CPU, or of two large summands.
    may_overflow = unit == 1.0 and (scores.is_cpu or (operands.bias is not None and spec.score_mod is not None))
    infinite = scores.isinf() if may_overflow else None
    if operands.bias is not None:
        scores = scores.add_(part_of(operands.bias, block.rows, block.keys).to(scores.dtype), alpha=unit)
    if operands.slopes is not None:
        scores = scores.sub_(operands.slopes * block.distance.abs(), alpha=unit)
    if infinite is not None:
        largest = torch.finfo(scores.dtype).max
        scores = torch.where(infinite, scores, scores.clamp(-largest, largest))
    if hidden is None:
        return scores, slopes, None
    others = operands.mask, operands.bias, operands.key_ranges, spec.mask_mod, spec.score_mod
    if block.shades is None or any(table is not None for table in others):
        scores = scores.masked_fill_(hidden, float("-inf"))
    elif operands.bounded:  # to add takes a tenth of the time
        for keys, shade in block.shades:
            scores[..., keys].add_(shade)
    else:
        for keys, _ in block.shades:
            scores[..., keys].masked_fill_(hidden[..., keys], float("-inf"))
    return scores, slopes, hidden


def capped_scores(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns what the score function takes: scores with scale and softcap, in memory of their own."""
    rows = heads_first(spec, operands.q, block, operands.k.dtype)
    scores = products(rows * factor_of(spec, 1.0), keys_in(operands.k, block).mT)
    return scores if spec.softcap is None else scores.tanh_().mul_(spec.softcap)


def scratch_products(operands: BlockOperands, name: str, rows: Any, matrix: Any) -> Any:
    """``products`` in the memory of that name."""
    if operands.scratch is None:
        return products(rows, matrix)
    batch, heads, group, height, _ = rows.shape
    return products(rows, matrix, operands.scratch.part(name, batch * heads, group * height, matrix.shape[3]))


def factor_of(spec: AttentionSpec, unit: float) -> float:
    """Returns the factor of the queries: with a softcap that of the tanh's argument, else the scale times the unit.

    A score function takes scores without the unit.
    """
    if spec.softcap is not None:
        return spec.scale / spec.softcap  # type: ignore[operator]
    return spec.scale * (unit if spec.score_mod is None else 1.0)  # type: ignore[operator]


def keys_in(table: Any, block: RowBlock) -> Any:
    """Returns a block's keys or values of ``[batch, kv_heads, kv_len, dim]``."""
    return table if block.keys == slice(0, table.shape[2]) else table[:, :, block.keys]


def hidden_in(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns which scores anything but a score function hides: bool, 5-D, broadcastable, or None."""
    hidden = None if block.hidden is None else block.hidden[None, None, None]
    if operands.mask is not None:
        masked = ~part_of(operands.mask, block.rows, block.keys)
        hidden = masked if hidden is None else masked | hidden
    if operands.key_ranges is not None:
        outside = _outside_ranges(operands, block)
        hidden = outside if hidden is None else outside | hidden
    if spec.mask_mod is not None:
        wide = operands.k.dtype
        shown = evaluate_torch(spec.mask_mod, places_of(spec, operands, block), None, operands.aux, wide)
        masked = ~shown.expand(*(1,) * (5 - shown.dim()), *shown.shape)
        hidden = masked if hidden is None else masked | hidden
    if operands.bias is not None:
        excluded = part_of(operands.bias, block.rows, block.keys) == float("-inf")
        hidden = excluded if hidden is None else excluded | hidden
    return hidden


def places_of(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> tuple[Any, ...]:
    """Returns b, h, q and k of the block's scores: int32, each with five axes, of which it uses its own."""
    import torch

    def count(start: int, stop: int, *shape: int) -> Any:
        return torch.arange(start, stop, dtype=torch.int32, device=operands.k.device).view(shape)

    return (
        count(0, spec.batch, -1, 1, 1, 1, 1),
        count(0, spec.num_heads, 1, spec.num_kv_heads, spec.group_size, 1, 1),
        count(block.rows.start, block.rows.stop, 1, 1, 1, -1, 1),
        count(block.keys.start, block.keys.stop, 1, 1, 1, 1, -1),
    )


def _outside_ranges(operands: BlockOperands, block: RowBlock) -> Any:
    """Returns which scores of the block no range shows: bool ``[batch or 1, kv_heads or 1, 1, rows, keys]``."""
    import torch

    rows = torch.arange(block.rows.start, block.rows.stop, dtype=torch.int32, device=operands.k.device)
    return contains(operands.key_ranges[:, :, :, block.keys], rows).logical_not_()
