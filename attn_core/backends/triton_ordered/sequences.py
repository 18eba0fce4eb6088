"""Where a sequence of a dense or packed call begins, and its lengths.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sequence_at(sequence, cu_seqlens_q, cu_seqlens_k, q_tokens, k_tokens, PACKED: tl.constexpr):
    """Returns (row, first query, queries, first key, keys), the row and the first tokens in 64 bits.

    A packed call has one row. Its offsets are on the device and cannot be checked, so they are clamped to the tokens.
    """
    if PACKED:
        row = (sequence * 0).to(tl.int64)
        first_query, queries = _document_at(cu_seqlens_q, sequence, q_tokens)
        first_key, keys = _document_at(cu_seqlens_k, sequence, k_tokens)
    else:
        row = sequence.to(tl.int64)
        first_query, queries, first_key, keys = (sequence * 0), q_tokens, (sequence * 0), k_tokens
    return row, first_query.to(tl.int64), queries, first_key.to(tl.int64), keys


@triton.jit
def _document_at(offsets, document, tokens):
    first = tl.minimum(tl.maximum(tl.load(offsets + document), 0), tokens)
    return first, tl.minimum(tl.maximum(tl.load(offsets + document + 1), first), tokens) - first
