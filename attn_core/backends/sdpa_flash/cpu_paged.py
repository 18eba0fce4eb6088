"""Keys and values in pages, for torch's CPU flash kernel: decoding in one call, everything else as packed documents.

If each sequence has one query, its pages are gathered into one row of a batch, and a mask hides the rest of the row.
The heads of a group become queries of the kernel, which then reads each key once for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from attn_core.backends.sdpa_flash import containment
from attn_core.backends.sdpa_flash.cpu_kernel import has_tiles, kernels, run_twice
from attn_core.backends.shared.pages.as_dense import packed_documents
from attn_core.backends.shared.sinks import with_sinks
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs

MOST_PADDING = 2
"""Rows are padded to the longest sequence if that makes at most this many times the tokens."""
FEW_TOKENS = 1024
"""So few padded tokens always are one call, because a call of each sequence costs more."""

WORTH_TWO_ROWS = 2048
"""Elements of a head's keys from which one query is computed twice in bfloat16 without tiles; see ``cpu_kernel``."""


def forward(
    spec: AttentionSpec, inputs: PagedInputs, packed_forward: Callable[[AttentionSpec, Inputs], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Returns (out, lse) of a paged call whose tables are checked.

    Args:
        packed_forward: runs a call on packed documents.
    """
    q, k, v, table, lengths, offsets, sinks = inputs[:7]
    results = None
    quantised = spec.paged is not None and spec.paged.dtype is not None
    if offsets is None and inputs.alibi_slopes is None and inputs.kv_starts is None and not quantised:
        results = decoder(spec, True)(q.detach(), k.detach(), v.detach(), table, lengths, sinks)
    if results is not None:
        return results
    out, lse = packed_forward(*packed_documents(spec, inputs))
    return out.to(q.dtype), lse


@lru_cache(maxsize=4096)
def decoder(spec: AttentionSpec, needs_lse: bool) -> Callable[..., tuple[Any, Any] | None]:
    """Returns a function that computes one query of each sequence in one call of the kernel.

    Its arguments are those of ``contract.paged_shortcut``. It returns (out, lse), or None if the lengths differ so much
    that a padded batch costs more than a call of each sequence. Without ``needs_lse`` lse may be anything.
    """
    paged, batch, page_size = spec.paged, spec.documents or 0, spec.paged.page_size if spec.paged else 1
    assert paged is not None
    kv_heads, dim, left = spec.num_kv_heads, spec.head_dim, band(spec).left
    slot, grouped, flat = kv_heads * dim, (batch, kv_heads, spec.group_size, dim), (batch, spec.num_heads, dim)
    kernel, scale, dtype, needs_lse = kernels()[0], spec.scale, spec.lse_dtype, needs_lse or spec.sinks
    alone = spec.group_size == 1 and spec.dtype == "bfloat16" and not has_tiles()

    def run(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any) -> tuple[Any, Any] | None:
        ends = lengths.tolist()
        longest, shortest = max(ends), min(ends)
        if (longest != shortest and not batch * longest <= max(FEW_TOKENS, MOST_PADDING * sum(ends))) or not longest:
            return None
        columns = -(-longest // page_size)
        used = table if columns == paged.width else table[:, :columns]
        if shortest <= (columns - 1) * page_size:  # entries behind a last page may hold any value
            used = used.clamp(0, paged.num_pages - 1)
        pages, keys = used.reshape(-1), longest if shortest == longest else columns * page_size
        # [pages, page_size, kv_heads, dim] -> [batch, kv_heads, keys, dim]
        layout = (batch, kv_heads, keys, dim), (columns * page_size * slot, dim, slot, 1)
        k, v = k.index_select(0, pages).as_strided(*layout), v.index_select(0, pages).as_strided(*layout)
        q = q.contiguous().reshape(grouped)  # the kernel reads channels and rows side by side, whatever the strides say
        op = run_twice if alone and longest * dim >= WORTH_TWO_ROWS else kernel
        if longest == shortest and (left is None or left >= longest - 1):
            out, lse = op(q, k, v, 0.0, False, scale=scale)
        else:
            out, lse = _masked(op, q, k, v, scale, _additive(dtype, ends, keys, left))
        out = out.reshape(flat)
        if needs_lse:
            lse = lse.flatten(1).t()
            if shortest == 0:
                lse = lse.masked_fill(lengths == 0, -math.inf)
        return with_sinks(out, lse, sinks) if sinks is not None else (out, lse)

    return run


def _masked(op: Any, q: Any, k: Any, v: Any, scale: Any, added: Any) -> tuple[Any, Any]:
    """Returns the kernel's (out, lse) under an additive mask ``[batch, 1, 1, keys]``."""
    out, lse = op(q, k, v, 0.0, False, attn_mask=added, scale=scale)
    if containment.are_results_finite(out, lse):
        return out, lse
    # [batch, 1, 1, keys] -> [batch, 1, keys, 1]; each row has one query, so what it does not see may become 0
    hidden = (added == -math.inf).transpose(2, 3)
    k, v = k.masked_fill_(hidden, 0.0), v.masked_fill_(hidden, 0.0)
    return op(q, k, v, 0.0, False, attn_mask=added, scale=scale)  # type: ignore[no-any-return]


def _additive(dtype: str, lengths: list[int], keys: int, left: int | None) -> Any:
    """Returns the additive mask ``[batch, 1, 1, keys]`` of the last token of each sequence, in a window if left."""
    import torch

    # The mask of each row is a part of one line, in which the zeros end where the row ends.
    line = np.full(2 * keys, -np.inf, dtype)
    line[0 if left is None else max(0, keys - left - 1) : keys] = 0
    rows = np.array([line[keys - length : 2 * keys - length] for length in lengths])
    return torch.from_numpy(rows).view(len(lengths), 1, 1, keys)
