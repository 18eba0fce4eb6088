"""Forward mode in plain torch operations, block by block: what ``plain_attention`` computes, together with tangents.

With w the softmax weights, f dropout's factors and m the tangent of the log-sum-exp:

    dt = slope * scale * (dq.k + q.dk) + dbias      m = sum w dt      dout = sum w f ((dt - m) v + dv)

A sink is one more term of m. Rows that see no key have tangent 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.plain.attention import QUERY_BLOCK, without_autocast
from attn_core.backends.shared.plain.blocks import (
    BlockOperands,
    dropout_factors,
    heads_first,
    in_rows,
    keys_in,
    operands_of,
    products,
    rows_first,
    scores_and_top,
    softmax,
    sum_over_keys,
    zero_hidden,
)
from attn_core.backends.shared.row_blocks import RowBlock, blocks
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents, part_of

if TYPE_CHECKING:
    from torch import Tensor

Results = tuple["Tensor", "Tensor", "Tensor", "Tensor"]
"""out, lse, dout and dlse."""


class Moves(NamedTuple):
    """The tangents in the layouts of ``BlockOperands``; None for a zero."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


@without_gradient
def jvp(spec: AttentionSpec, inputs: Inputs, tangents: Tangents) -> Results:
    """Returns out, lse and their tangents, with a batch axis only if the spec is not packed."""
    import torch

    with without_autocast(inputs.q):
        operands = operands_of(spec, inputs)
        moves = moves_of(spec, operands, tangents)
        shape = (spec.batch, spec.q_len, spec.num_heads, spec.value_dim)
        out, dout = (torch.zeros(shape, dtype=inputs.q.dtype, device=inputs.q.device) for _ in range(2))
        lse = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        dlse = torch.zeros_like(lse)
        for block in blocks(spec, inputs, QUERY_BLOCK):
            out_part, lse_part, dout_part, dlse_part = _block(spec, operands, moves, block)
            for whole, part in ((out, out_part), (dout, dout_part)):
                whole[:, block.rows] = rows_first(part)
            for whole, part in ((lse, lse_part), (dlse, dlse_part)):
                whole[:, :, block.rows] = part.flatten(1, 2)
    results = out, lse, dout, dlse
    return tuple(each[0] for each in results) if spec.packed else results  # type: ignore[return-value]


def moves_of(spec: AttentionSpec, operands: BlockOperands, tangents: Tangents) -> Moves:
    """Returns the tangents in the layouts that blocks read."""
    wide, grouped = operands.k.dtype, (spec.num_kv_heads, spec.group_size)

    def of_rows(tangent: Tensor | None) -> Tensor | None:
        return tangent if tangent is None or not spec.packed else tangent[None]

    def of_keys(tangent: Tensor | None) -> Tensor | None:
        # [batch, kv_len, kv_heads, dim] -> [batch, kv_heads, kv_len, dim]
        return None if tangent is None else of_rows(tangent).transpose(1, 2).to(wide).contiguous()  # type: ignore[union-attr]

    bias = tangents.dbias
    if bias is not None:  # [batch, heads or 1, q, kv] -> [batch, kv_heads or 1, group or 1, q, kv]
        bias = bias.unflatten(1, grouped if bias.shape[1] > 1 else (1, 1))
    sinks = None if tangents.dsinks is None else tangents.dsinks.to(wide).reshape(1, *grouped, 1, 1)
    return Moves(of_rows(tangents.dq), of_keys(tangents.dk), of_keys(tangents.dv), bias, sinks)


def _block(spec: AttentionSpec, operands: BlockOperands, moves: Moves, block: RowBlock) -> Results:
    """Returns one block's out and dout ``[batch, kv_heads, group, rows, value_dim]``, and lse and dlse without dim."""
    import torch

    scores, slopes, hidden, top, _, overflowed = scores_and_top(spec, operands, block, keep=True)
    moved = _moved_logits(spec, operands, moves, block, slopes, hidden)
    empty = top == -torch.inf
    weights, total, lse = softmax(scores, top, empty, operands.unit)
    weights = weights.div_(total.masked_fill(empty, 1.0))
    mean = torch.zeros_like(lse) if moved is None else (weights * moved).sum(-1, keepdim=True)
    if operands.sinks is not None:
        with_sink = torch.logaddexp(lse, operands.sinks)
        share, of_sink = (torch.exp(each - with_sink).masked_fill_(empty, 0.0) for each in (lse, operands.sinks))
        weights, mean = weights.mul_(share), mean * share
        if moves.sinks is not None:
            mean = mean + of_sink * moves.sinks
        lse = with_sink.masked_fill_(empty, -torch.inf)
    dropped = weights * dropout_factors(spec, operands, block) if spec.dropout else weights
    values = keys_in(operands.v, block)
    out = sum_over_keys(dropped, values, hidden)
    centred = -mean if moved is None else moved - mean
    dout = sum_over_keys(zero_hidden(dropped * centred, hidden), values, hidden)
    if moves.v is not None:
        dout = dout + sum_over_keys(dropped, keys_in(moves.v, block), hidden)
    results = out, lse.squeeze(-1), dout, mean.squeeze(-1)
    if overflowed is None:
        return results
    exact = _block(spec, operands._replace(unit=1.0), moves, block)
    return in_rows(overflowed, exact, results)


def _moved_logits(
    spec: AttentionSpec,
    operands: BlockOperands,
    moves: Moves,
    block: RowBlock,
    slopes: list[Tensor],
    hidden: Tensor | None,
) -> Tensor | None:
    """Returns the tangents of the logits, 0 where hidden; None if they do not move."""
    wide, moved = operands.k.dtype, moved_scores(spec, operands, moves, block)
    for each in slopes if moved is not None else []:
        moved = moved.mul_(each)  # type: ignore[union-attr]
    if moves.bias is not None:
        bias = part_of(moves.bias, block.rows, block.keys).to(wide)
        moved = bias.expand(*_scores_shape(spec, block)).clone() if moved is None else moved.add_(bias)
    return None if moved is None else zero_hidden(moved, hidden)


def moved_scores(spec: AttentionSpec, operands: BlockOperands, moves: Moves, block: RowBlock) -> Tensor | None:
    """Returns the tangents of the scaled scores, before softcap; None if neither q nor k moves."""
    wide, moved = operands.k.dtype, None
    if moves.q is not None:
        moved = products(heads_first(spec, moves.q, block, wide), keys_in(operands.k, block).mT)
    if moves.k is not None:
        part = products(heads_first(spec, operands.q, block, wide), keys_in(moves.k, block).mT)
        moved = part if moved is None else moved.add_(part)
    return None if moved is None else moved.mul_(spec.scale)  # type: ignore[arg-type]


def _scores_shape(spec: AttentionSpec, block: RowBlock) -> tuple[int, ...]:
    rows, keys = (part.stop - part.start for part in (block.rows, block.keys))
    return spec.batch, spec.num_kv_heads, spec.group_size, rows, keys
