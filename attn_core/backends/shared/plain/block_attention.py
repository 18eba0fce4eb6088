"""One block of attention in torch operations, forward and backward: the arithmetic behind the math backend.

Scores and weights are ``[batch, kv_heads, group, rows, keys]``: each key/value head is read once for its whole group.
"""

from __future__ import annotations

import math
from typing import Any

from attn_core.backends.shared.parts.row_blocks import RowBlock
from attn_core.backends.shared.plain.block_operands import BlockOperands, SavedTensors, Sums
from attn_core.backends.shared.plain.contained_sums import products, sum_over_keys, sum_over_rows
from attn_core.call.dropout import keep
from attn_core.call.functions import lookup_slopes, slope
from attn_core.call.key_ranges import contains
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_torch import add_at_lookup, evaluate_torch

LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def forward_block(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> tuple[Any, Any, Any]:
    """Returns out ``[batch, kv_heads, group, rows, value_dim]``, and lse and log2(e) * row maxima without value_dim."""
    import torch

    hidden = hidden_in(spec, operands, block)
    scores, _, hidden = scores_of(spec, operands, block, hidden)
    top = scores.amax(dim=-1, keepdim=True)
    empty = None if hidden is None else top == -torch.inf
    if empty is not None and empty.is_cpu and not empty.any():
        empty = None
    weights, total, lse = softmax(scores, top, empty)
    if spec.dropout:
        weights = weights * dropout_factors(spec, operands, block)
    out = sum_over_keys(weights, keys_in(operands.v, block), None if operands.bounded else hidden)
    out = out.div_(total if empty is None else total.masked_fill_(empty, 1.0))
    if operands.sinks is not None:
        share = torch.sigmoid(lse - operands.sinks)  # 0 for an empty row, but NaN if its sink is -inf, too
        out = out.mul_(share if empty is None else share.masked_fill_(empty, 0.0))
        lse = torch.logaddexp(lse, operands.sinks)
        lse = lse if empty is None else lse.masked_fill_(empty, -torch.inf)
    return out, lse.squeeze(-1), top.squeeze(-1)


def softmax(scores: Any, top: Any, empty: Any) -> tuple[Any, Any, Any]:
    """Returns weights that are not divided by their sums, the sums, and the log-sum-exp; overwrites the scores.

    Args:
        scores: multiplied by log2(e).
        top: the largest score of each row.
        empty: which rows see no key, or None. Their weights are 0, and their log-sum-exp is -inf.
    """
    weights = scores.sub_(top if empty is None else top.masked_fill(empty, 0.0)).exp2_()
    total = weights.sum(dim=-1, keepdim=True)
    return weights, total, total.log2().add_(top).mul_(LN2)


def backward_block(
    spec: AttentionSpec, operands: BlockOperands, saved: SavedTensors, sums: Sums, block: RowBlock
) -> None:
    """Adds one block's share to the sums: ``ds = p * (dp - delta + dlse)`` with ``delta = sum(dout * out)``."""
    import torch

    grouped = (spec.num_kv_heads, spec.group_size)
    hidden = hidden_in(spec, operands, block)
    scores, slopes, hidden = scores_of(spec, operands, block, hidden, keep=True)
    hidden = None if operands.bounded else hidden  # hidden weights are 0, whatever they are multiplied by
    out, dout = (heads_first(spec, tensor, block, scores.dtype) for tensor in (saved.out, saved.dout))
    lse = saved.lse[:, :, block.rows].unflatten(1, grouped)[..., None]
    empty = lse == -torch.inf
    row_term = -(dout * out).sum(dim=-1, keepdim=True)  # dlse - delta, the same for all keys of a row
    if saved.dlse is not None:
        row_term = row_term + saved.dlse[:, :, block.rows].to(row_term.dtype).unflatten(1, grouped)[..., None]
    row_term = row_term.masked_fill(empty, 0.0)

    weights = zero_hidden(scores.sub_(lse.masked_fill(empty, 0.0) * LOG2E).exp2_(), hidden)
    dweights = _scratch_products(operands, "dweights", dout, keys_in(operands.v, block).mT)
    dropped = weights
    if spec.dropout:
        factors = dropout_factors(spec, operands, block)
        dropped, dweights = weights * factors, dweights * factors
    sums.dv[:, :, block.keys] += sum_over_rows(dropped, dout, hidden)
    dscores = zero_hidden(dweights.add_(row_term).mul_(weights), hidden)
    if sums.dbias is not None:
        # The bias is added after softcap and score function, so its gradient has no factor of theirs.
        part = part_of(sums.dbias, block)
        part += dscores.sum_to_size(part.shape)
    if sums.dsinks is not None:
        sink_weight = torch.exp(operands.sinks - lse).masked_fill(empty, 0.0)
        sums.dsinks.add_((sink_weight * row_term).sum(dim=(0, 3), keepdim=True))
    if sums.daux is not None:
        _add_to_aux(spec, operands, block, dscores, hidden, sums.daux)
    for each in slopes:
        dscores = zero_hidden(dscores * each, hidden)  # a hidden score may be NaN
    dscores = dscores * spec.scale
    sums.dq[:, block.rows] = rows_first(sum_over_keys(dscores, keys_in(operands.k, block), hidden))
    q = heads_first(spec, operands.q, block, scores.dtype)
    sums.dk[:, :, block.keys] += sum_over_rows(dscores, q, hidden)


def _add_to_aux(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, dlogits: Any, hidden: Any, sums: dict[int, Any]
) -> None:
    """Adds one block's share to the gradients of the score function's arrays; hidden pairs, of any slope, add 0."""
    places, scores = places_of(spec, operands, block), capped_scores(spec, operands, block)
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients):  # type: ignore[arg-type]
        summand = zero_hidden(dlogits * evaluate_torch(tree, places, scores, operands.aux), hidden)
        add_at_lookup(sums[int(node.value or 0)], node, summand, places, scores, operands.aux)


def capped_scores(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns what the score function takes: scores with scale and softcap, in memory of their own."""
    rows = heads_first(spec, operands.q, block, operands.k.dtype)
    scores = products(rows * factor_of(spec), keys_in(operands.k, block).mT)
    return scores if spec.softcap is None else scores.tanh_().mul_(spec.softcap)


def scores_of(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, hidden: Any, keep: bool = False
) -> tuple[Any, list[Any], Any]:
    """Returns the scores, -inf where hidden, what their gradient is multiplied by in turn, and what is hidden.

    The factors are the slopes of score function and softcap; without ``keep`` there are none. A score function may hide
    more pairs. The scores are multiplied by log2(e): on a CPU, exp2 takes half the time of exp. The caller may
    overwrite them.
    """
    cap, slopes, factor = spec.softcap, [], LOG2E if spec.score_mod is None else 1.0
    q = heads_first(spec, operands.q, block, operands.k.dtype) * factor_of(spec)
    scores = _scratch_products(operands, "scores", q, keys_in(operands.k, block).mT)
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
        scores = scores.mul_(LOG2E)
    if operands.bias is not None:
        scores = scores.add_(part_of(operands.bias, block).to(scores.dtype), alpha=LOG2E)
    if operands.slopes is not None:
        scores = scores.sub_(operands.slopes * block.distance.abs(), alpha=LOG2E)
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


def _scratch_products(operands: BlockOperands, name: str, rows: Any, matrix: Any) -> Any:
    """``products`` in the memory of that name."""
    if operands.scratch is None:
        return products(rows, matrix)
    batch, heads, group, height, _ = rows.shape
    return products(rows, matrix, operands.scratch.part(name, batch * heads, group * height, matrix.shape[3]))


def factor_of(spec: AttentionSpec) -> float:
    """Returns the factor of the queries: with a softcap that of the tanh's argument, else the scale for exp2.

    A score function takes scores that are not multiplied for exp2.
    """
    if spec.softcap is not None:
        return spec.scale / spec.softcap  # type: ignore[operator]
    return spec.scale * (LOG2E if spec.score_mod is None else 1.0)  # type: ignore[operator]


def keys_in(table: Any, block: RowBlock) -> Any:
    """Returns a block's keys or values of ``[batch, kv_heads, kv_len, dim]``."""
    return table if block.keys == slice(0, table.shape[2]) else table[:, :, block.keys]


def hidden_in(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns which scores anything but a score function hides: bool, 5-D, broadcastable, or None."""
    hidden = None if block.hidden is None else block.hidden[None, None, None]
    if operands.mask is not None:
        masked = ~part_of(operands.mask, block)
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
        excluded = part_of(operands.bias, block) == float("-inf")
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


def zero_hidden(values: Any, hidden: Any) -> Any:
    """Returns the values with 0 where they are hidden; overwrites them."""
    return values if hidden is None else values.masked_fill_(hidden, 0.0)


def part_of(table: Any, block: RowBlock) -> Any:
    """The block's view of a table that is broadcastable to the scores of the whole call."""
    rows = table if table.shape[3] == 1 else table[..., block.rows, :]
    return rows if table.shape[4] == 1 else rows[..., block.keys]


def dropout_factors(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns 0 where a weight is dropped, ``1 / (1 - dropout)`` elsewhere."""
    import torch

    device = operands.k.device
    batch = torch.arange(spec.batch, device=device)[:, None, None, None, None]
    head = torch.arange(spec.num_heads, device=device).view(spec.num_kv_heads, spec.group_size, 1, 1)
    row = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    column = torch.arange(block.keys.start, block.keys.stop, device=device)
    return keep(operands.rng, (batch, head, row, column), spec.dropout).to(operands.k.dtype) / (1.0 - spec.dropout)


def heads_first(spec: AttentionSpec, tensor: Any, block: RowBlock, dtype: Any) -> Any:
    """The block's rows of ``[batch, q_len, heads, dim]`` as ``[batch, kv_heads, group, rows, dim]`` in the dtype."""
    rows = tensor if block.rows == slice(0, tensor.shape[1]) else tensor[:, block.rows]
    shape = (*rows.shape[:2], spec.num_kv_heads, spec.group_size, rows.shape[3])
    return rows.reshape(shape).permute(0, 2, 3, 1, 4).to(dtype).contiguous()


def rows_first(tensor: Any) -> Any:
    """``[batch, kv_heads, group, rows, dim]`` -> ``[batch, rows, heads, dim]``."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)
