"""Attention in plain torch operations, forward and backward, block by block: the loops behind the math backend.

Other backends use it for rows that their kernel computes wrongly, e.g. rows with NaN.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

from attn_core.backends.shared.block_attention import (
    BlockOperands,
    SavedTensors,
    Sums,
    backward_block,
    empty_sums,
    forward_block,
    operands_of,
    rows_first,
)
from attn_core.backends.shared.row_blocks import blocks
from attn_core.backends.shared.split_documents import DocumentSlices
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

QUERY_BLOCK = 128
"""Query rows computed at once: the scores in memory are ``[batch, heads, QUERY_BLOCK, kv_len]``."""


def forward(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None = None
) -> tuple[Any, Any]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs.

    Args:
        valid_documents: see ``row_blocks.blocks``.
    """
    with _without_autograd(inputs.q):
        operands = operands_of(spec, inputs)
        out: Any = None
        lse: Any = None
        for block in blocks(spec, inputs, QUERY_BLOCK, valid_documents):
            part, part_lse = forward_block(spec, operands, block)
            part, part_lse = rows_first(part), part_lse.flatten(1, 2)  # [batch, rows, heads, dim], [batch, heads, rows]
            if part_lse.shape[2] == spec.q_len:  # the only block
                out, lse = part.to(inputs.q.dtype).contiguous(), part_lse
                break
            if out is None:
                out, lse = _empty_results(spec, inputs, operands)
            out[:, block.rows] = part
            lse[:, :, block.rows] = part_lse
        if out is None:
            out, lse = _empty_results(spec, inputs, operands)
    return (out[0], lse[0]) if spec.packed else (out, lse)


def _empty_results(spec: AttentionSpec, inputs: Inputs, operands: BlockOperands) -> tuple[Any, Any]:
    """Returns (out, lse) of rows in no block, which see no key: 0 and -inf."""
    out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
    return out, operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    with _without_autograd(inputs.q):
        operands = operands_of(spec, inputs)
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))
        saved = SavedTensors(out, lse, dout, dlse)
        sums = empty_sums(spec, operands)
        for block in blocks(spec, inputs, QUERY_BLOCK):
            backward_block(spec, operands, saved, sums, block)
        return _gradients(spec, inputs, sums)


def _without_autograd(q: Any) -> AbstractContextManager[Any]:
    """Returns a context without autograd, and without autocast, which would round the float32 products."""
    import torch

    if not torch._C._is_any_autocast_enabled():  # to enter autocast takes as long as several operations
        return torch.no_grad()
    stack = ExitStack()
    stack.enter_context(torch.autocast(q.device.type, enabled=False))
    stack.enter_context(torch.no_grad())
    return stack


def _gradients(spec: AttentionSpec, inputs: Inputs, sums: Sums) -> Gradients:
    # [batch, kv_heads, kv_len, dim] -> [batch, kv_len, kv_heads, dim]
    dk, dv = (total.transpose(1, 2).to(inputs.k.dtype).contiguous() for total in (sums.dk, sums.dv))
    dq = sums.dq
    return Gradients(
        *((dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)),
        dbias=None if sums.dbias is None else sums.dbias.view(inputs.bias.shape).to(inputs.bias.dtype),
        dsinks=None if sums.dsinks is None else sums.dsinks.view(spec.num_heads).to(inputs.sinks.dtype),
    )
