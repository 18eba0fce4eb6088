"""FlashAttention 2 and 3 on paged keys and values: refusals and calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from attn_core.backends.shared.pages.pools import pools, query_offsets, safe_tables
from attn_core.backends.shared.readable import readable, writable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.paged.arguments import one_query_each

FLASH2_PAGES = 256
"""FlashAttention 2 takes page sizes that are multiples of this."""
FLASH3_PAGE = 80
"""From this page size on, a page may hold a whole tile of keys. FlashAttention 3 then loads whole tiles if the queries
fill a tile of their own."""
FLASH3_ROWS = 64
"""Up to this many queries times heads of a group, the queries do not fill a tile."""


def flash2_refusals(spec: AttentionSpec, name: str, width: int) -> Iterator[str]:
    """Yields refusals of page sizes and widths. width: the head dimension that the kernel would run the call at."""
    page_size = spec.paged.page_size if spec.paged else 0
    if page_size % FLASH2_PAGES:
        yield f"page_size={page_size}: {name} takes pages of multiples of {FLASH2_PAGES} tokens"
    yield from _padded(spec, name, {width})


def flash3_refusals(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    """Yields refusals of widths, and of pages that the kernel would read past the end of a sequence.

    On an H200, a NaN behind a sequence's end reached the output.
    """
    page_size = spec.paged.page_size if spec.paged else 0
    yield from _padded(spec, name, widths)
    if page_size >= FLASH3_PAGE and (spec.max_len_q or 0) * spec.group_size > FLASH3_ROWS:
        why = "reads last pages to their end, so a NaN left there by another sequence would reach the output"
        yield f"page_size={page_size} with {spec.max_len_q} queries of a sequence: {name} {why}"


def _padded(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    if widths != {spec.head_dim} or spec.value_dim != spec.head_dim:
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} would need a padded copy of the whole pool"


def flash2(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, varlen_fwd: Callable[..., Any], settings: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Returns (out, lse). The kernel takes each sequence's length from ``seqused_k`` and ignores the key offsets."""
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    queries, buffer = query_offsets(spec, inputs), None if into is None else writable(into[0])
    offsets = (queries, queries, lengths, None, table)  # key offsets are required but unused with lengths
    results = varlen_fwd(readable(inputs.q), k, v, buffer, *offsets, *settings, False, None)
    # The log-sum-exp is the third result from the end in every version of flash-attn; see flash2.
    out, lse = results[0], results[-3]
    # The kernel may return another view of the buffer, which the caller would copy onto itself.
    out = buffer if buffer is not None and out.data_ptr() == buffer.data_ptr() else out
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def flash3(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, operator: Callable[..., Callable[..., Any]]
) -> tuple[Any, Any]:
    """Returns (out, lse). One query per sequence runs as a batch of one-query rows, which the kernel splits best.

    Args:
        operator: returns a function of the tensors with the names that it gets.
    """
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    q, buffer = readable(inputs.q), None if into is None else writable(into[0])
    alone, out = one_query_each(spec), buffer
    if alone:  # [tokens, heads, head_dim] -> [tokens, 1, heads, head_dim]
        q, out = q[:, None], None if out is None else out[:, None]
    run = operator("q", "k", "v", "page_table", "seqused_k", "out", "cu_seqlens_q")
    result, lse, *_ = run(q, k, v, table, lengths, out, None if alone else inputs.cu_seqlens_q.contiguous())
    if buffer is not None:
        result = buffer
    elif alone:
        result = result[:, 0]
    return result, lse[..., 0].T if alone else lse  # [tokens, heads, 1] -> [heads, tokens]
