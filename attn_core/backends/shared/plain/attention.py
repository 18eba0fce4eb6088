"""Attention in plain torch operations, forward and backward, block by block: the loops behind the math backend.

Other backends use it for rows that their kernel computes wrongly, e.g. rows with NaN.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.parts.call_chunks import CallChunk, chunks
from attn_core.backends.shared.parts.row_blocks import blocks
from attn_core.backends.shared.parts.split_documents import DocumentSlices
from attn_core.backends.shared.plain import small_attention
from attn_core.backends.shared.plain.block_attention import backward_block, forward_block
from attn_core.backends.shared.plain.block_operands import (
    WINDOW_BLOCK,
    BlockOperands,
    SavedTensors,
    ScoreMemory,
    Sums,
    empty_sums,
    has_narrow_window,
    operands_of,
    rows_first,
)
from attn_core.call.functions import DAUX, aux_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

QUERY_BLOCK = 128
"""The most query rows computed at once: the scores in memory are ``[batch, heads, QUERY_BLOCK, kv_len]``."""
FEWEST_ROWS = 32
CACHED_SCORES = 2**19
"""On a CPU a block is computed for fewer heads, then has fewer rows, down to FEWEST_ROWS, if it would have more scores
than this, 2 MiB in float32: each operation reads and writes all of them, in the processor's cache if they fit."""


def forward(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None = None
) -> tuple[Any, Any]:
    """See ``Backend.forward``. The log-sum-exp is float32, or float64 for float64 inputs.

    Args:
        valid_documents: see ``row_blocks.blocks``.
    """
    out, lse, _ = results(spec, inputs, valid_documents)
    return out, lse


def forward_with_maximum(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any, Any]:
    """See ``contract.forward_with_maximum``."""
    out, lse, top = results(spec, inputs, maximum=True)
    return out, lse, top.view(spec.lse_shape)


@without_gradient
def results(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None = None, maximum: bool = False
) -> tuple[Any, Any, Any]:
    """Returns out, lse, and the rows' largest logits of lse's shape, or without ``maximum`` None."""
    import torch

    with without_autocast(inputs.q):
        # A fake tensor has no values to look at, and is of another type.
        if inputs.q.is_cpu and small_attention.fits(spec) and type(inputs.q) in (torch.Tensor, torch.nn.Parameter):
            found = small_attention.results(spec, inputs, maximum)
            if found is not None:
                return found
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs), scores)
        out: Any = None
        lse: Any = None
        top: Any = None
        for block in blocks(spec, inputs, height, valid_documents):
            for chunk in parts:
                some = operands if chunk.whole else chunk.of_operands(operands)
                part, part_lse, part_top = forward_block(chunk.spec, some, block, maximum)
                # [batch, rows, heads, dim], [batch, heads, rows]
                part, part_lse = rows_first(part), part_lse.flatten(1, 2)
                part_top = part_top.flatten(1, 2) if maximum else None
                if part_lse.shape == (spec.batch, spec.num_heads, spec.q_len):  # the only block
                    out, lse, top = part.to(inputs.q.dtype).contiguous(), part_lse, part_top
                    break
                if out is None:
                    out, lse = _empty_results(spec, inputs, operands)
                    top = lse.clone() if maximum else None
                out[chunk.batch, block.rows, chunk.heads] = part
                lse[chunk.batch, chunk.heads, block.rows] = part_lse
                if maximum:
                    top[chunk.batch, chunk.heads, block.rows] = part_top
        if out is None:
            out, lse = _empty_results(spec, inputs, operands)
            top = lse.clone() if maximum else None
    return (out[0], lse[0], top[0] if maximum else None) if spec.packed else (out, lse, top)


@lru_cache(maxsize=1024)
def block_sizes(spec: AttentionSpec, on_cpu: bool) -> tuple[int, tuple[CallChunk, ...], int]:
    """Returns a block's number of rows, the chunks of the call, and the most scores of a block in a chunk.

    The scores of a chunk stay in the cache. Their number is 0 if the blocks need no memory in common.
    """
    if not on_cpu:
        return QUERY_BLOCK, chunks(spec, spec.batch * spec.num_kv_heads), 0
    left, right = spec.window
    right = 0 if spec.causal else right
    keys = spec.kv_len if spec.max_len_k is None else spec.max_len_k
    tallest = min(QUERY_BLOCK, WINDOW_BLOCK) if has_narrow_window(spec) else QUERY_BLOCK
    rows = min(spec.q_len if spec.max_len_q is None else spec.max_len_q, tallest)
    if left is not None and right is not None:
        keys = min(keys, left + right + rows)
    in_cache = CACHED_SCORES // max(1, spec.group_size * keys)  # rows of one key/value head
    parts = chunks(spec, in_cache // max(rows, 1))
    heads = 1 if not parts[0].whole else spec.batch * spec.num_kv_heads
    height = min(max(in_cache // heads, FEWEST_ROWS), tallest)
    largest = max(part.spec.batch * part.spec.num_heads for part in parts) * min(height, rows) * keys
    return height, parts, 0 if parts[0].whole and height >= spec.q_len else largest


def with_scratch(operands: BlockOperands, scores: int) -> BlockOperands:
    return operands._replace(scratch=ScoreMemory(operands.k, scores)) if scores else operands


def _empty_results(spec: AttentionSpec, inputs: Inputs, operands: BlockOperands) -> tuple[Any, Any]:
    """Returns out and lse of rows in no block, which see no key: 0 and -inf. Their largest logit is -inf, too."""
    out = inputs.q.new_zeros((spec.batch, spec.q_len, spec.num_heads, spec.value_dim))
    lse = operands.k.new_full((spec.batch, spec.num_heads, spec.q_len), float("-inf"))
    return out, lse


@without_gradient
def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Any,
    lse: Any,
    dout: Any,
    dlse: Any,
    differentiable: bool = False,
) -> Gradients:
    """See ``Backend.backward``.

    Args:
        differentiable: whether torch's forward mode runs through the operations, which then share no memory.
    """
    with without_autocast(inputs.q):
        out, lse, dout, dlse = (t[None] if spec.packed and t is not None else t for t in (out, lse, dout, dlse))
        saved = SavedTensors(out, lse, dout, dlse)
        height, parts, scores = block_sizes(spec, inputs.q.is_cpu)
        operands = with_scratch(operands_of(spec, inputs, saved), 0 if differentiable else scores)
        sums = empty_sums(spec, operands)
        for block in blocks(spec, inputs, height):
            for chunk in parts:
                if chunk.whole:
                    backward_block(spec, operands, saved, sums, block)
                    continue
                of_chunk = chunk.of_operands(operands), chunk.of_saved(saved), chunk.of_sums(sums)
                backward_block(chunk.spec, *of_chunk, block)
        return gradients_of(spec, inputs, sums)


def without_autocast(q: Any) -> AbstractContextManager[Any]:
    """Returns a context without autocast, which would round the float32 products."""
    import torch

    if not torch._C._is_any_autocast_enabled():  # to enter autocast takes as long as several operations
        return nullcontext()
    return torch.autocast(q.device.type, enabled=False)


def gradients_of(spec: AttentionSpec, inputs: Inputs, sums: Sums) -> Gradients:
    """Returns sums of gradients in the shapes and dtypes of the inputs."""
    # [batch, kv_heads, kv_len, dim] -> [batch, kv_len, kv_heads, dim]
    dk, dv = (total.transpose(1, 2).to(inputs.k.dtype).contiguous() for total in (sums.dk, sums.dv))
    dq = sums.dq
    return Gradients(
        *((dq[0], dk[0], dv[0]) if spec.packed else (dq, dk, dv)),
        dbias=None if sums.dbias is None else sums.dbias.view(inputs.bias.shape).to(inputs.bias.dtype),
        dsinks=None if sums.dsinks is None else sums.dsinks.view(spec.num_heads).to(inputs.sinks.dtype),
        **{DAUX[number]: total.to(aux_of(inputs)[number].dtype) for number, total in (sums.daux or {}).items()},
    )
