"""FlashAttention 2 and 3 on keys and values in pages: what they refuse, and their calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from attn_core.backends.shared.flash3_operators import Plan
from attn_core.backends.shared.pools import pools, query_offsets, safe_tables
from attn_core.backends.shared.rewrites import readable, writable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.paged.arguments import one_query_each

FLASH2_PAGES = 256
"""What a page's size must be a multiple of in FlashAttention 2."""
FLASH3_PAGE = 80
"""From here on a page may hold whole tiles of keys, which FlashAttention 3 loads whole where queries fill a tile."""
FLASH3_ROWS = 64
"""Queries, times the heads of a group, up to which they fill none."""


def flash2_refusals(spec: AttentionSpec, name: str, width: int) -> Iterator[str]:
    """Page sizes and widths; width: the head dimension that the kernel would run the call at."""
    page_size = spec.paged.page_size if spec.paged else 0
    if page_size % FLASH2_PAGES:
        yield f"page_size={page_size}: {name} takes pages of multiples of {FLASH2_PAGES} tokens"
    yield from _padded(spec, name, {width})


def flash3_refusals(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    """Widths, and pages that it would read past the end of a sequence; seen on an H200 with NaN left there."""
    page_size = spec.paged.page_size if spec.paged else 0
    yield from _padded(spec, name, widths)
    if page_size >= FLASH3_PAGE and (spec.max_len_q or 0) * spec.group_size > FLASH3_ROWS:
        why = "reads last pages to their end, where what another sequence left (a NaN) would reach the output"
        yield f"page_size={page_size} with {spec.max_len_q} queries of a sequence: {name} {why}"


def _padded(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    if widths != {spec.head_dim} or spec.value_dim != spec.head_dim:
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} would need a padded copy of the whole pool"


def flash2(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, varlen_fwd: Callable[..., Any], settings: tuple[Any, ...]
) -> tuple[Any, Any]:
    """(out, lse). How many keys a sequence has comes from ``seqused_k``; the kernel reads no key offsets beside it."""
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    queries, wanted = query_offsets(spec, inputs), None if into is None else writable(into[0])
    offsets = (queries, queries, lengths, None, table)
    found = varlen_fwd(readable(inputs.q), k, v, wanted, *offsets, *settings, False, None)
    out, lse = found[0], found[-3]
    out = wanted if wanted is not None and out.data_ptr() == wanted.data_ptr() else out
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def flash3(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, operator: Callable[..., Any], plan: Plan
) -> tuple[Any, Any]:
    """(out, lse). One query for each sequence goes as a batch of rows of one, which the kernel splits best."""
    import torch

    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    q, wanted = readable(inputs.q), None if into is None else writable(into[0])
    alone, out = one_query_each(spec), wanted
    offsets = {} if alone else {"cu_seqlens_q": inputs.cu_seqlens_q.contiguous()}
    if alone:  # [tokens, heads, head_dim] -> [tokens, 1, heads, head_dim]
        q, out = q[:, None], None if out is None else out[:, None]
    tensors = {"q": q, "k": k, "v": v, "page_table": table, "seqused_k": lengths, "out": out}
    with torch.no_grad():  # an operator without a derivative would still leave a node that warns
        made, lse, *_ = operator(*plan.filled(**tensors, **offsets))
    if wanted is not None:
        made = wanted
    elif alone:
        made = made[:, 0]
    return made, lse[..., 0].T if alone else lse  # [tokens, heads, 1] -> [heads, tokens]
