"""Forward over reverse in plain torch operations, block by block: the tangents of ``plain_attention.backward``.

With t() for a tangent, p the softmax weights, f dropout's factors, r = dlse - sum(dout * out):

    t(logit) = slopes * scale * (t(q).k + q.t(k)) + t(bias)       t(p) = p * (t(logit) - t(lse))
    dp = f * dout.v       t(dp) = f * (t(dout).v + dout.t(v))     t(r) = t(dlse) - sum(t(dout) * out + dout * t(out))
    ds = p * (dp + r)     t(ds) = t(p) * (dp + r) + p * (t(dp) + t(r))
    dz = ds * slopes      t(dz) = t(ds) * slopes + ds * t(slopes)
    t(dq) = scale * (t(dz) k + dz t(k))                           t(dk) = scale * (t(dz)' q + dz' t(q))
    t(dv) = f * (t(p)' dout + p' t(dout))

out and lse are arguments with tangents of their own, as the forward returned them. The slopes are those of softcap and
of a score function, whose tangents need second derivatives: -2 tanh (1 - tanh^2) / softcap, and the expression's.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.parts.row_blocks import RowBlock, blocks
from attn_core.backends.shared.plain.attention import QUERY_BLOCK, gradients_of, without_autocast
from attn_core.backends.shared.plain.block_attention import (
    dropout_factors,
    weights_of_backward,
    zero_hidden,
)
from attn_core.backends.shared.plain.block_operands import (
    BlockOperands,
    SavedTensors,
    Sums,
    empty_sums,
    heads_first,
    operands_of,
    rows_first,
)
from attn_core.backends.shared.plain.block_scores import (
    capped_scores,
    hidden_in,
    keys_in,
    part_of,
    places_of,
    scores_of,
)
from attn_core.backends.shared.plain.block_weights import saved_rows
from attn_core.backends.shared.plain.contained_sums import products, sum_over_keys, sum_over_rows
from attn_core.backends.shared.plain.tangents import Moves, moved_scores, moves_of
from attn_core.call.functions import slope
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, Tangents
from attn_core.expressions.on_torch import evaluate_torch


@without_gradient
def backward_jvp(
    spec: AttentionSpec, inputs: Inputs, saved: SavedTensors, tangents: Tangents, moved: SavedTensors
) -> Gradients:
    """Returns the tangents of a call's gradients. See ``contract.backward_jvp_of``."""
    with without_autocast(inputs.q):
        saved, moved = (
            SavedTensors(*(t[None] if spec.packed and t is not None else t for t in each)) for each in (saved, moved)
        )
        operands = operands_of(spec, inputs)
        moves, sums = moves_of(spec, operands, tangents), empty_sums(spec, operands)
        for block in blocks(spec, inputs, QUERY_BLOCK):
            _add_block(spec, operands, moves, saved, moved, sums, block)
        return gradients_of(spec, inputs, sums)


def _add_block(
    spec: AttentionSpec,
    operands: BlockOperands,
    moves: Moves,
    saved: SavedTensors,
    moved: SavedTensors,
    sums: Sums,
    block: RowBlock,
) -> None:
    """Adds one block's share to the sums of tangents."""
    import torch

    wide = operands.k.dtype
    lse, of_lse = (_rows(spec, each, block, wide) for each in (saved.lse, moved.lse))
    rows = saved_rows(spec, lse)
    scores, slopes, hidden = scores_of(spec, operands, block, hidden_in(spec, operands, block), keep=True)
    of_scores = moved_scores(spec, operands, moves, block)
    of_logits = _moved_logits(spec, moves, block, of_scores, slopes, scores, hidden)
    out, dout, of_out, of_dout = (
        None if each is None else heads_first(spec, each, block, wide)
        for each in (saved.out, saved.dout, moved.out, moved.dout)
    )
    empty = lse == -torch.inf
    row = _row_term(_rows(spec, saved.dlse, block, wide), [(dout, out)]).masked_fill(empty, 0.0)
    pairs = [(of_dout, out), (dout, of_out)]
    of_row = _row_term(_rows(spec, moved.dlse, block, wide), pairs, row).masked_fill(empty, 0.0)
    weights, of_sinks = weights_of_backward(spec, operands, block, scores, rows)
    weights = zero_hidden(weights, hidden).masked_fill(empty, 0.0)
    of_weights = zero_hidden(weights * (of_logits if of_lse is None else of_logits - of_lse), hidden)

    values = keys_in(operands.v, block).mT
    dweights, of_dweights = products(dout, values), torch.zeros_like(weights)
    if of_dout is not None:
        of_dweights = of_dweights + products(of_dout, values)
    if moves.v is not None:
        of_dweights = of_dweights + products(dout, keys_in(moves.v, block).mT)
    dropped, of_dropped = weights, of_weights
    if spec.dropout:
        factors = dropout_factors(spec, operands, block)
        dropped, of_dropped = weights * factors, of_weights * factors
        dweights, of_dweights = dweights * factors, of_dweights * factors
    sums.dv[:, :, block.keys] += sum_over_rows(of_dropped, dout, hidden)
    if of_dout is not None:
        sums.dv[:, :, block.keys] += sum_over_rows(dropped, of_dout, hidden)

    of_dscores = zero_hidden(of_weights * (dweights + row) + weights * (of_dweights + of_row), hidden)
    dscores = zero_hidden(weights * (dweights + row), hidden)
    _add_to_tables(operands, moves, sums, block, of_dscores, (of_sinks, of_lse, row, of_row))
    for each, of_each in zip(slopes, _moved_slopes(spec, operands, block, of_scores, slopes), strict=True):
        of_dscores = zero_hidden(of_dscores * each + (0.0 if of_each is None else dscores * of_each), hidden)
        dscores = zero_hidden(dscores * each, hidden)
    dscores, of_dscores = dscores * spec.scale, of_dscores * spec.scale
    dq = sum_over_keys(of_dscores, keys_in(operands.k, block), hidden)
    sums.dk[:, :, block.keys] += sum_over_rows(of_dscores, heads_first(spec, operands.q, block, wide), hidden)
    if moves.k is not None:
        dq = dq + sum_over_keys(dscores, keys_in(moves.k, block), hidden)
    if moves.q is not None:
        sums.dk[:, :, block.keys] += sum_over_rows(dscores, heads_first(spec, moves.q, block, wide), hidden)
    sums.dq[:, block.rows] = rows_first(dq)


def _rows(spec: AttentionSpec, table: Any, block: RowBlock, dtype: Any) -> Any:
    """Returns a block's rows of ``[batch, heads, q_len]`` as ``[batch, kv_heads, group, rows, 1]``; None for None."""
    if table is None:
        return None
    return table[:, :, block.rows].to(dtype).unflatten(1, (spec.num_kv_heads, spec.group_size))[..., None]


def _row_term(dlse: Any, pairs: list[tuple[Any, Any]], like: Any = None) -> Any:
    """Returns dlse minus the sums over channels of the products; zeros like ``like`` if there is none of them."""
    total = dlse
    for one, other in pairs:
        if one is not None and other is not None:
            product = (one * other).sum(dim=-1, keepdim=True)
            total = -product if total is None else total - product
    return like.new_zeros(like.shape) if total is None else total


def _moved_logits(
    spec: AttentionSpec, moves: Moves, block: RowBlock, of_scores: Any, slopes: list[Any], like: Any, hidden: Any
) -> Any:
    """Returns the tangents of the logits, 0 where hidden."""
    total = like.new_zeros(like.shape) if of_scores is None else of_scores.clone()
    for each in reversed(slopes):
        total = total * each
    if moves.bias is not None:
        total = total + part_of(moves.bias, block).to(total.dtype)
    return zero_hidden(total, hidden)


def _moved_slopes(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, of_scores: Any, slopes: list[Any]
) -> list[Any]:
    """Returns the tangents of the slopes, in their order: of the score function, then of softcap. None for a zero."""
    if of_scores is None or not slopes:
        return [None] * len(slopes)
    capped, results = capped_scores(spec, operands, block), []
    of_capped = of_scores
    if spec.softcap is not None:
        of_capped = of_scores * slopes[-1]
        results = [capped / spec.softcap * of_capped * (-2.0 / spec.softcap)]
    if spec.score_mod is not None:
        bend = evaluate_torch(slope(slope(spec.score_mod)), places_of(spec, operands, block), capped, operands.aux)
        results.insert(0, bend * of_capped)
    return results


def _add_to_tables(
    operands: BlockOperands, moves: Moves, sums: Sums, block: RowBlock, of_dscores: Any, rows: tuple[Any, ...]
) -> None:
    """Adds a block's share to the tangents of the gradients of bias and sinks."""
    if sums.dbias is not None:
        part = part_of(sums.dbias, block)
        part += of_dscores.sum_to_size(part.shape)
    if sums.dsinks is not None:
        weight, of_lse, row, of_row = rows
        share = of_row
        for sign, each in ((1.0, moves.sinks), (-1.0, of_lse)):
            share = share if each is None else share + sign * each * row
        sums.dsinks.add_((share * weight).sum(dim=(0, 3), keepdim=True))
