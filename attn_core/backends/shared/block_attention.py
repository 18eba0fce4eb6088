"""One block of attention in torch operations, forward and backward: the arithmetic behind the math backend.

Scores and weights are ``[batch, kv_heads, group, rows, keys]``: each key/value head is read once for its whole group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.shared.contained_sums import products, sum_over_keys, sum_over_rows
from attn_core.backends.shared.row_blocks import RowBlock
from attn_core.call.dropout import keep
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

FEW_VALUES = 2**14
"""So few values are one operation, because starting it takes longest."""


class BlockOperands(NamedTuple):
    """The call's tensors in the layouts that the blocks read.

    q: the caller's, ``[batch, q_len, heads, head_dim]``. k, v: ``[batch, kv_heads, kv_len, dim]``, accumulation dtype.
    mask, bias: ``[batch, kv_heads, group, q_len, kv_len]``; any axis may be 1. slopes, sinks: the last two axes are 1.
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    slopes: Any
    sinks: Any
    rng: Any


class SavedTensors(NamedTuple):
    """The forward's results and the incoming gradients, with a batch axis."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any


class Sums(NamedTuple):
    """Running sums of the gradients, in the accumulation dtype and the layouts of BlockOperands.

    dq has q's dtype: each of its rows belongs to one block and is written once.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    dsinks: Any


def operands_of(spec: AttentionSpec, inputs: Inputs) -> BlockOperands:
    """Brings the call's tensors into the layouts and dtypes of BlockOperands."""
    import torch

    wide = getattr(torch, spec.lse_dtype)
    grouped = (spec.num_kv_heads, spec.group_size)
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in (inputs.q, inputs.k, inputs.v))

    def by_group(table: Any) -> Any:  # [batch, heads or 1, q, kv] -> [batch, kv_heads or 1, group or 1, q, kv]
        return None if table is None else table.unflatten(1, grouped if table.shape[1] > 1 else (1, 1))

    def per_head(values: Any) -> Any:  # [heads] or [batch, heads] -> [batch or 1, kv_heads, group, 1, 1]
        return None if values is None else values.to(wide).reshape(-1, *grouped, 1, 1)

    return BlockOperands(
        q=q,
        k=k.transpose(1, 2).to(wide).contiguous(),
        v=v.transpose(1, 2).to(wide).contiguous(),
        mask=by_group(inputs.mask),
        bias=by_group(inputs.bias),
        slopes=per_head(inputs.alibi_slopes),
        sinks=per_head(inputs.sinks),
        rng=inputs.rng,
    )


def forward_block(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> tuple[Any, Any]:
    """Returns out ``[batch, kv_heads, group, rows, value_dim]`` and lse ``[batch, kv_heads, group, rows]``."""
    import torch

    hidden = _hidden(operands, block)
    scores, _ = _scores(spec, operands, block, hidden)
    top = scores.amax(dim=-1, keepdim=True)
    weights = torch.softmax(scores, dim=-1)  # one pass over the scores, which are the largest tensor
    empty = None if hidden is None else top == -torch.inf
    if empty is not None and (not empty.is_cpu or empty.any()):
        weights = weights.masked_fill_(empty, 0.0)  # NaN, the softmax of nothing
    # softmax divides by a sum that it rounds more coarsely than ``sum`` does, so its weights are divided once more.
    total = weights.sum(dim=-1, keepdim=True)
    lse = total.log().sub_(weights.amax(dim=-1, keepdim=True).log_()).add_(top)  # the largest weight was exp(0)
    if spec.dropout:
        weights = weights * _dropout_factors(spec, operands, block)
    out = sum_over_keys(weights, _of_keys(operands.v, block), hidden)
    if empty is None:
        out = out.div_(total)
    else:
        out, lse = out.div_(total.masked_fill_(empty, 1.0)), lse.masked_fill_(empty, -torch.inf)
    if operands.sinks is not None:
        share = torch.sigmoid(lse - operands.sinks)  # 0 for an empty row, but NaN if its sink is -inf, too
        out = out.mul_(share if empty is None else share.masked_fill_(empty, 0.0))
        lse = torch.logaddexp(lse, operands.sinks)
        lse = lse if empty is None else lse.masked_fill_(empty, -torch.inf)
    return out, lse.squeeze(-1)


def backward_block(
    spec: AttentionSpec, operands: BlockOperands, saved: SavedTensors, sums: Sums, block: RowBlock
) -> None:
    """Adds one block's share to the sums: ``ds = p * (dp - delta + dlse)`` with ``delta = sum(dout * out)``."""
    import torch

    grouped = (spec.num_kv_heads, spec.group_size)
    hidden = _hidden(operands, block)
    scores, tanh = _scores(spec, operands, block, hidden, keep=True)
    out, dout = (_heads_first(spec, tensor, block, scores.dtype) for tensor in (saved.out, saved.dout))
    lse = saved.lse[:, :, block.rows].unflatten(1, grouped)[..., None]
    empty = lse == -torch.inf
    row_term = -(dout * out).sum(dim=-1, keepdim=True)  # dlse - delta, the same for all keys of a row
    if saved.dlse is not None:
        row_term = row_term + saved.dlse[:, :, block.rows].to(row_term.dtype).unflatten(1, grouped)[..., None]
    row_term = row_term.masked_fill(empty, 0.0)

    weights = _zero_hidden(scores.sub_(lse.masked_fill(empty, 0.0)).exp_(), hidden)
    dweights = products(dout, _of_keys(operands.v, block).mT)
    dropped = weights
    if spec.dropout:
        factors = _dropout_factors(spec, operands, block)
        dropped, dweights = weights * factors, dweights * factors
    sums.dv[:, :, block.keys] += sum_over_rows(dropped, dout, hidden)
    dscores = _zero_hidden(dweights.add_(row_term).mul_(weights), hidden)
    if sums.dbias is not None:
        # The bias is added after the softcap, so its gradient has no factor of the softcap.
        part = _part(sums.dbias, block)
        part += dscores.sum_to_size(part.shape)
    if sums.dsinks is not None:
        sink_weight = torch.exp(operands.sinks - lse).masked_fill(empty, 0.0)
        sums.dsinks.add_((sink_weight * row_term).sum(dim=(0, 3), keepdim=True))
    if tanh is not None:
        dscores = _zero_hidden(dscores * (1.0 - tanh.square()), hidden)  # a hidden score may be NaN
    dscores = dscores * spec.scale
    sums.dq[:, block.rows] = rows_first(sum_over_keys(dscores, _of_keys(operands.k, block), hidden))
    q = _heads_first(spec, operands.q, block, scores.dtype)
    sums.dk[:, :, block.keys] += sum_over_rows(dscores, q, hidden)


def _scores(
    spec: AttentionSpec, operands: BlockOperands, block: RowBlock, hidden: Any, keep: bool = False
) -> tuple[Any, Any]:
    """Returns the scores, -inf where hidden, and the softcap's tanh (None without a softcap, or without ``keep``).

    The caller may overwrite the scores.
    """
    cap, tanh = spec.softcap, None
    scale = spec.scale if cap is None else spec.scale / cap  # type: ignore[operator]
    q = _heads_first(spec, operands.q, block, operands.k.dtype) * scale
    scores: Any = products(q, _of_keys(operands.k, block).mT)
    if cap is not None:
        tanh = scores.tanh_() if scores.numel() <= FEW_VALUES or not scores.is_cpu else _tanh(scores)
        scores = tanh * cap if keep else tanh.mul_(cap)
    if operands.bias is not None:
        scores = scores + _part(operands.bias, block).to(scores.dtype)
    if operands.slopes is not None:
        scores = scores - operands.slopes * block.distance.abs()
    if hidden is not None and block.cut is not None and operands.mask is None and operands.bias is None:
        for keys in block.cut:
            scores[..., keys].masked_fill_(hidden[..., keys], float("-inf"))
    elif hidden is not None:
        scores = scores.masked_fill_(hidden, float("-inf"))
    return scores, tanh if keep else None


def _tanh(values: Any) -> Any:
    """Returns the hyperbolic tangent; overwrites the values. Beyond 20 it is 1.

    On a CPU, torch's tanh of many values takes twice as long as ``expm1`` and the steps around it.
    """
    grown = values.clamp_(-20.0, 20.0).mul_(2.0).expm1_()
    return grown.div_(grown + 2.0)


def _of_keys(table: Any, block: RowBlock) -> Any:
    """Returns a block's keys or values of ``[batch, kv_heads, kv_len, dim]``."""
    return table if block.keys == slice(0, table.shape[2]) else table[:, :, block.keys]


def _hidden(operands: BlockOperands, block: RowBlock) -> Any:
    """Returns which scores band, documents, mask or a bias of -inf hide: bool, 5-D, broadcastable; None for none."""
    hidden = None if block.hidden is None else block.hidden[None, None, None]
    if operands.mask is not None:
        masked = ~_part(operands.mask, block)
        hidden = masked if hidden is None else masked | hidden
    if operands.bias is not None:
        excluded = _part(operands.bias, block) == float("-inf")
        hidden = excluded if hidden is None else excluded | hidden
    return hidden


def _zero_hidden(values: Any, hidden: Any) -> Any:
    return values if hidden is None else values.masked_fill_(hidden, 0.0)


def _part(table: Any, block: RowBlock) -> Any:
    """The block's view of a table that is broadcastable to the scores of the whole call."""
    rows = table if table.shape[3] == 1 else table[..., block.rows, :]
    return rows if table.shape[4] == 1 else rows[..., block.keys]


def _dropout_factors(spec: AttentionSpec, operands: BlockOperands, block: RowBlock) -> Any:
    """Returns 0 where a weight is dropped, ``1 / (1 - dropout)`` elsewhere."""
    import torch

    device = operands.k.device
    batch = torch.arange(spec.batch, device=device)[:, None, None, None, None]
    head = torch.arange(spec.num_heads, device=device).view(spec.num_kv_heads, spec.group_size, 1, 1)
    row = torch.arange(block.rows.start, block.rows.stop, device=device)[:, None]
    column = torch.arange(block.keys.start, block.keys.stop, device=device)
    return keep(operands.rng, (batch, head, row, column), spec.dropout).to(operands.k.dtype) / (1.0 - spec.dropout)


def _heads_first(spec: AttentionSpec, tensor: Any, block: RowBlock, dtype: Any) -> Any:
    """The block's rows of ``[batch, q_len, heads, dim]`` as ``[batch, kv_heads, group, rows, dim]`` in the dtype."""
    rows = tensor if block.rows == slice(0, tensor.shape[1]) else tensor[:, block.rows]
    shape = (*rows.shape[:2], spec.num_kv_heads, spec.group_size, rows.shape[3])
    return rows.reshape(shape).permute(0, 2, 3, 1, 4).to(dtype).contiguous()


def rows_first(tensor: Any) -> Any:
    """``[batch, kv_heads, group, rows, dim]`` -> ``[batch, rows, heads, dim]``."""
    return tensor.permute(0, 3, 1, 2, 4).flatten(2, 3)


def empty_sums(spec: AttentionSpec, operands: BlockOperands) -> Sums:
    """Returns sums of zeros for the gradients that the call needs."""
    import torch

    dbias = operands.k.new_zeros(operands.bias.shape) if spec.bias_gradient else None
    return Sums(
        dq=torch.zeros_like(operands.q, memory_format=torch.contiguous_format),
        dk=torch.zeros_like(operands.k),
        dv=torch.zeros_like(operands.v),
        dbias=dbias,
        dsinks=torch.zeros_like(operands.sinks) if spec.sinks else None,
    )
