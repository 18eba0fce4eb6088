"""The reference for keys and values in pages: copies each sequence out of its pages, then uses the dense reference."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.paged.quantised.numbers import dequantised
from attn_core.paged.tables import slots_of

Array = np.ndarray


def gather_pages(spec: AttentionSpec, inputs: Any) -> tuple[AttentionSpec, Inputs]:
    """Returns the same call on packed documents, as a spec and inputs without pages.

    Keys and values are copied from the pages of each sequence, up to its length. Nothing else of the pool is read, so
    that NaN in unused slots cannot reach the reference.
    """
    page_size, lengths = spec.paged.page_size, np.asarray(inputs.seq_lens, np.int64)  # type: ignore[union-attr]
    starts = lengths * 0 if inputs.kv_starts is None else np.minimum(inputs.kv_starts, lengths)
    cu_k = np.concatenate([[0], np.cumsum(lengths - starts)]).astype(np.int32)
    cu_q = np.arange(len(lengths) + 1, dtype=np.int32) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    table = np.asarray(inputs.block_table)
    # Token i of a sequence is at place i % page_size of page row[i // page_size].
    slots = np.concatenate(
        [
            row[np.arange(first, n) // page_size] * page_size + np.arange(first, n) % page_size
            for row, first, n in zip(table, starts, lengths)
        ]
        or [np.zeros(0, np.int64)]  # np.concatenate refuses an empty list
    )
    # [num_pages, page_size, kv_heads, dim] -> [tokens, kv_heads, dim]
    k, v = (np.asarray(pool).reshape(-1, *pool.shape[2:])[slots] for pool in numbers_of(spec, inputs))
    longest = int((lengths - starts).max(initial=0))
    ranges = inputs.key_ranges
    if ranges is not None:
        ranges = np.asarray(ranges)
        wide = np.zeros((1, ranges.shape[1], len(slots), *ranges.shape[3:]), np.int32)
        wide[..., 0, 1] = spec.q_len  # every query sees a key that was there before
        for at, end in enumerate(cu_k[1:]):
            # The new tokens are the last ones. There may be more of them than the sequence has tokens.
            count = min(cu_q[at + 1] - cu_q[at], lengths[at] - starts[at])
            wide[:, :, end - count : end] = ranges[:, :, cu_q[at + 1] - count : cu_q[at + 1]]
        ranges = wide
    shape = None if ranges is None else ranges.shape
    of_sequences = len(spec.alibi_shape or ()) == 2
    changes: dict[str, Any] = {"key_ranges_shape": shape, "alibi_shape": None if of_sequences else spec.alibi_shape}
    packed = replace(spec, paged=None, kv_len=len(slots), max_len_k=longest, **changes)
    tables = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "key_ranges": ranges, "alibi_slopes": inputs.alibi_slopes}
    if of_sequences:
        # Packed documents have one slope per head, so slopes of each sequence are a bias of all tokens.
        bias = _slopes_as_bias(packed, inputs.alibi_slopes, cu_q, cu_k)
        packed = replace(packed, bias_shape=bias.shape, bias_dtype=spec.lse_dtype)
        tables |= {"alibi_slopes": None, "bias": bias}
    return packed, Inputs(inputs.q, k, v, sinks=inputs.sinks, **tables)


def _slopes_as_bias(spec: AttentionSpec, slopes: Any, cu_q: Any, cu_k: Any) -> Array:
    """Returns ``-slope * |i + N - n - j|`` within each sequence, ``[1, heads, tokens, kv_tokens]``; 0 elsewhere."""
    bias = np.zeros((1, spec.num_heads, spec.q_len, spec.kv_len))
    for of_sequence, (q0, q1), (k0, k1) in zip(slopes, pairwise(cu_q), pairwise(cu_k)):
        distance = np.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - np.arange(k1 - k0)
        bias[0, :, q0:q1, k0:k1] = -np.asarray(of_sequence, np.float64)[:, None, None] * abs(distance)
    return bias


def numbers_of(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """Returns the numbers of both pools; those of quantised pages as float64, without any rounding."""
    if spec.paged is None or spec.paged.dtype is None:
        return inputs.k, inputs.v
    dtype = spec.paged.dtype
    return dequantised(inputs.k, inputs.k_scales, dtype), dequantised(inputs.v, inputs.v_scales, dtype)


def append(pages: Array, new: Array, block_table: Array, seq_lens: Array, cu_seqlens_q: Array) -> Array:
    """Returns a copy of a pool with new tokens written to the last slots of each sequence.

    Args:
        pages: the pool, ``[num_pages, page_size, kv_heads, dim]``.
        new: the new tokens of all sequences, ``[tokens, kv_heads, dim]``.
        block_table, seq_lens, cu_seqlens_q: as PagedInputs has them; ``seq_lens`` counts the new tokens.
    """
    slots = slots_of(block_table, seq_lens, cu_seqlens_q, pages.shape[1])
    result = np.array(pages)
    result.reshape(-1, *pages.shape[2:])[slots] = new
    return result
