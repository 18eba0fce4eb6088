"""The softmax weights of a block: those of a forward, and those that a backward computes again from the log-sum-exp."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from attn_core.backends.shared.plain.block_operands import LOG2E, BlockOperands
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.spec import AttentionSpec

LN2 = math.log(2.0)


def softmax(scores: Any, top: Any, empty: Any, unit: float) -> tuple[Any, Any, Any]:
    """Returns weights that are not divided by their sums, the sums, and the log-sum-exp; overwrites the scores.

    Args:
        scores: multiplied by the unit.
        top: the largest score of each row.
        empty: which rows see no key, or None. Their weights are 0, and their log-sum-exp is -inf.
        unit: see BlockOperands.
    """
    weights = _exponentials(scores.sub_(top if empty is None else top.masked_fill(empty, 0.0)), unit)
    total = weights.sum(dim=-1, keepdim=True)
    return weights, total, total.log().add_(top) if unit == 1.0 else total.log2().add_(top).mul_(LN2)


def without_unit(scores: Any, unit: float) -> Any:
    """Returns scores that are not multiplied by the unit."""
    return scores if unit == 1.0 else scores * LN2


def _exponentials(scores: Any, unit: float) -> Any:
    return scores.exp_() if unit == 1.0 else scores.exp2_()


class SavedRows(NamedTuple):
    """What a backward knows of a block's rows: ``[batch, kv_heads, group, rows, 1]``.

    Attributes:
        lse: the log-sum-exps, 0 in rows that see no key.
        empty: which rows see no key; None if there are none.
        large: the rows with an lse beyond LARGE_LSE; None if there are none.
        overflowed: the rows whose scores are too large to be multiplied by log2(e); None if there are none.
    """

    lse: Any
    empty: Any
    large: Any
    overflowed: Any


def saved_rows(spec: AttentionSpec, lse: Any) -> SavedRows:
    """Returns what log-sum-exps say of their rows. Off the CPU, to look at the values would wait for the device."""
    import torch

    size = torch.linalg.vector_norm
    on_host = lse.is_cpu and type(lse) is torch.Tensor  # a fake tensor has no values to look at
    if on_host and size(lse, math.inf).item() < LARGE_LSE:  # False for NaN, and if a row sees no key
        return SavedRows(lse, None, None, None)
    empty = lse == -torch.inf
    lse, large, overflowed = lse.masked_fill(empty, 0.0), None, None
    if (on_host and not size(lse, math.inf).item() < LARGE_LSE) or (not on_host and may_be_large(spec)):
        # The rest of a row is in other parts, so its sum is not known here.
        large = None if spec.partial else (lse.abs() >= LARGE_LSE) & lse.isfinite()
    if on_host and large is not None:
        overflowed = large & (lse.abs() > torch.finfo(lse.dtype).max / LOG2E)
        overflowed = overflowed if overflowed.any() else None
    return SavedRows(lse, empty, large, overflowed)


def weights_again(operands: BlockOperands, scores: Any, rows: SavedRows) -> tuple[Any, Any]:
    """Returns the weights, and those of the sinks or None; overwrites the scores.

    They are exp(score - lse). Where the lse is so large that it has lost the logarithm of the row's sum, they are
    divided by their own sum, as in a forward.
    """
    import torch

    unit, sinks, large = operands.unit, operands.sinks, rows.large
    shift = rows.lse if unit == 1.0 else rows.lse * unit
    of_sinks: Any = None if sinks is None else torch.exp(sinks - rows.lse)
    if large is not None:
        top = scores.amax(dim=-1, keepdim=True)
        top = top if sinks is None else torch.maximum(top, sinks * unit)
        shift = torch.where(large, top, shift)
    weights = _exponentials(scores.sub_(shift), unit)
    if large is not None:
        total = weights.sum(dim=-1, keepdim=True)
        if sinks is not None:
            alone = _exponentials(sinks * unit - top, unit)
            total = total + alone
            of_sinks = torch.where(large, alone / total, of_sinks)
        weights = weights.div_(torch.where(large, total, 1.0))
    if of_sinks is not None and rows.empty is not None:
        of_sinks = of_sinks.masked_fill(rows.empty, 0.0)
    return weights, of_sinks
