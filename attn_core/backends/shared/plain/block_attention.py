"""One block of attention in torch operations, forward and backward: the arithmetic behind the math backend.

Scores and weights are ``[batch, kv_heads, group, rows, keys]``: each key/value head is read once for its whole group.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.parts.row_blocks import RowBlock
from attn_core.backends.shared.plain.block_operands import BlockOperands, SavedTensors, Sums, heads_first, rows_first
from attn_core.backends.shared.plain.block_scores import (
    capped_scores,
    hidden_in,
    keys_in,
    places_of,
    scores_and_top,
    scores_of,
    scratch_products,
)
from attn_core.backends.shared.plain.block_weights import (
    SavedRows,
    saved_rows,
    softmax,
    weights_again,
    without_unit,
)
from attn_core.backends.shared.plain.contained_sums import sum_over_keys, sum_over_rows
from attn_core.call.arithmetic import dropout_keeps
from attn_core.call.functions import lookup_slopes
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import part_of
from attn_core.expressions.on_torch import add_at_lookup, evaluate_torch


def forward_block(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, maximum: bool = False
) -> tuple[Any, Any, Any]:
    """Returns out ``[batch, kv_heads, group, rows, value_dim]``, lse without value_dim, and such row maxima or None."""
    import torch

    scores, _, hidden, top, empty, overflowed = scores_and_top(spec, operands, block)
    weights, total, lse = softmax(scores, top, empty, operands.unit)
    if spec.dropout:
        weights = weights * dropout_factors(spec, operands, block)
    out = sum_over_keys(weights, keys_in(operands.v, block), None if operands.bounded else hidden)
    out = out.div_(total if empty is None else total.masked_fill_(empty, 1.0))
    if operands.sinks is not None:
        share = torch.sigmoid(lse - operands.sinks)  # 0 for an empty row, but NaN if its sink is -inf, too
        out = out.mul_(share if empty is None else share.masked_fill_(empty, 0.0))
        lse = torch.logaddexp(lse, operands.sinks)
        lse = lse if empty is None else lse.masked_fill_(empty, -torch.inf)
    results = out, lse.squeeze(-1), without_unit(top, operands.unit).squeeze(-1) if maximum else None
    if overflowed is None:
        return results
    return in_rows(overflowed, forward_block(spec, operands._replace(unit=1.0), block, maximum), results)


def in_rows(rows: Any, ones: tuple[Any, ...], others: tuple[Any, ...]) -> Any:
    """Returns ``ones`` in some rows ``[batch, kv_heads, group, rows, 1]`` and ``others`` elsewhere; None stays None."""
    import torch

    fitting = {rows.dim(): rows, rows.dim() - 1: rows.squeeze(-1)}
    pairs = zip(ones, others, strict=True)
    return tuple(None if one is None else torch.where(fitting[one.dim()], one, other) for one, other in pairs)


def backward_block(
    spec: AttentionSpec, operands: BlockOperands, saved: SavedTensors, sums: Sums, block: RowBlock
) -> None:
    """Adds one block's share to the sums: ``ds = p * (dp - delta + dlse)`` with ``delta = sum(dout * out)``."""
    grouped = (spec.num_kv_heads, spec.group_size)
    rows = saved_rows(spec, saved.lse[:, :, block.rows].unflatten(1, grouped)[..., None])
    hidden = hidden_in(spec, operands, block)
    scores, slopes, hidden = scores_of(spec, operands, block, hidden, keep=True)
    hidden = None if operands.bounded else hidden  # hidden weights are 0, whatever they are multiplied by
    out, dout = (heads_first(spec, tensor, block, scores.dtype) for tensor in (saved.out, saved.dout))
    row_term = -(dout * out).sum(dim=-1, keepdim=True)  # dlse - delta, the same for all keys of a row
    if saved.dlse is not None:
        row_term = row_term + saved.dlse[:, :, block.rows].to(row_term.dtype).unflatten(1, grouped)[..., None]
    row_term = row_term if rows.empty is None else row_term.masked_fill(rows.empty, 0.0)

    weights, of_sinks = weights_of_backward(spec, operands, block, scores, rows)
    weights = zero_hidden(weights, hidden)
    dweights = scratch_products(operands, "dweights", dout, keys_in(operands.v, block).mT)
    dropped = weights
    if spec.dropout:
        factors = dropout_factors(spec, operands, block)
        dropped, dweights = weights * factors, dweights * factors
    sums.dv[:, :, block.keys] += sum_over_rows(dropped, dout, hidden)
    dscores = zero_hidden(dweights.add_(row_term).mul_(weights), hidden)
    if sums.dbias is not None:
        # The bias is added after softcap and score function, so its gradient has no factor of theirs.
        part = part_of(sums.dbias, block.rows, block.keys)
        part += dscores.sum_to_size(part.shape)
    if sums.dsinks is not None:
        sums.dsinks.add_((row_term * of_sinks).sum(dim=(0, 3), keepdim=True))
    if sums.daux is not None:
        _add_to_aux(spec, operands, block, dscores, hidden, sums.daux)
    for each in slopes:
        dscores = zero_hidden(dscores * each, hidden)  # a hidden score may be NaN
    dscores = dscores * spec.scale
    sums.dq[:, block.rows] = rows_first(sum_over_keys(dscores, keys_in(operands.k, block), hidden))
    q = heads_first(spec, operands.q, block, scores.dtype)
    sums.dk[:, :, block.keys] += sum_over_rows(dscores, q, hidden)


def weights_of_backward(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, scores: Any, rows: SavedRows
) -> tuple[Any, Any]:
    """Returns ``weights_again``, with the unit 1 in rows whose scores overflowed."""
    results = weights_again(operands, scores, rows)
    if rows.overflowed is None:
        return results
    natural = operands._replace(unit=1.0, scratch=None)
    exact, _, _ = scores_of(spec, natural, block, hidden_in(spec, operands, block))
    return in_rows(rows.overflowed, weights_again(natural, exact, rows), results)  # type: ignore[no-any-return]


def _add_to_aux(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, dlogits: Any, hidden: Any, sums: dict[int, Any]
) -> None:
    """Adds one block's share to the gradients of the score function's arrays; hidden pairs, of any slope, add 0."""
    places, scores = places_of(spec, operands, block), capped_scores(spec, operands, block)
    for node, tree in lookup_slopes(spec.score_mod, spec.aux_gradients):  # type: ignore[arg-type]
        summand = zero_hidden(dlogits * evaluate_torch(tree, places, scores, operands.aux), hidden)
        add_at_lookup(sums[int(node.value or 0)], node, summand, places, scores, operands.aux)


def zero_hidden(values: Any, hidden: Any) -> Any:
    """Returns the values with 0 where they are hidden; overwrites them."""
    return values if hidden is None else values.masked_fill_(hidden, 0.0)


def dropout_factors(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns 0 where a weight is dropped, ``1 / (1 - dropout)`` elsewhere."""
    import torch

    device = operands.k.device
    batch = torch.arange(spec.batch, device=device)[:, None, None, None, None]
    head = torch.arange(spec.num_heads, device=device).view(spec.num_kv_heads, spec.group_size, 1, 1)
    row = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    column = torch.arange(block.keys.start, block.keys.stop, device=device)
    kept = dropout_keeps(operands.rng, (batch, head, row, column), spec.dropout)
    return kept.to(operands.k.dtype) / (1.0 - spec.dropout)
