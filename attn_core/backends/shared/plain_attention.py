"""Attention in plain torch operations, forward and backward, block by block: the loops behind the math backend.

Other backends use it for rows that their kernel computes wrongly, e.g. rows with NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from attn_core.backends.shared.block_attention import (
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
        # Rows in no block see no key: they keep 0 and -inf.
        out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
        lse = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
        for block in blocks(spec, inputs, QUERY_BLOCK, valid_documents):
            part, part_lse = forward_block(spec, operands, block)
            out[:, block.rows] = rows_first(part)
            lse[:, :, block.rows] = part_lse.flatten(1, 2)  # [batch, kv_heads, group, rows] -> [batch, heads, rows]
    return (out[0], lse[0]) if spec.packed else (out, lse)


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


@contextmanager
def _without_autograd(q: Any) -> Iterator[None]:
    """Turns off autograd, and autocast, which would round the float32 products."""
    import torch

    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        yield


def _gradients(spec: AttentionSpec, inputs: Inputs, sums: Sums) -> Gradients:
    # [batch, kv_heads, kv_len, dim] -> [batch, kv_len, kv_heads, dim]
    dk, dv = (total.transpose(1, 2).to(inputs.k.dtype).contiguous() for total in (sums.dk, sums.dv))
    dq = sums.dq
    return Gradients(
        *((dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)),
        dbias=None if sums.dbias is None else sums.dbias.view(inputs.bias.shape).to(inputs.bias.dtype),
        dsinks=None if sums.dsinks is None else sums.dsinks.view(spec.num_heads).to(inputs.sinks.dtype),
    )
