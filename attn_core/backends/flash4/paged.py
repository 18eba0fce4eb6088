"""FlashAttention-4 on keys and values in pages: what it refuses, and its call.

Its Hopper kernel reads pages in one of two ways. Where a page is just one tile of keys, the tile is loaded whole, with
what lies behind the end of the sequence: masked, but 0 * NaN is NaN. Any other page is read row by row, and rows behind
the end are zeros (``cp.async`` with a size of 0, seen in the compiled code). Only the second way is taken here. The
tiles are those that flash-attn-4 chooses itself; they are passed on, so that a later version cannot choose a page's
size. At head_dim 96 its rows are copied 32 at a time into tiles of 144, so that half a copy lies behind the tile; the
widths below are those whose tiles are whole copies.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: interface.py, flash_fwd_sm90.py, paged_kv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attn_core.backends.flash4.operands import window, writable
from attn_core.backends.shared.pools import pools, query_offsets, safe_tables
from attn_core.backends.shared.rewrites import readable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs

TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}
"""By head dimension, how many queries and keys a tile has."""
WINDOWED_KEYS = {256: 64}
"""How many keys it has instead in a call with a window."""


def tile(spec: AttentionSpec) -> tuple[int, int]:
    """(queries, keys) of a tile of a call that ``refusals`` says nothing against."""
    (queries, keys), (left, right) = TILES[spec.head_dim], window(spec)
    windowed = left is not None or right not in (None, 0)
    return queries, WINDOWED_KEYS.get(spec.head_dim, keys) if windowed else keys


def refusals(spec: AttentionSpec, device: str, name: str) -> Iterator[str]:
    """Devices, widths, and the one page size of each width that is read beyond the ends of sequences."""
    page_size = spec.paged.page_size if spec.paged else 0
    if device == "sm100":
        yield f"keys and values in pages of {page_size}: {name} is not claimed for them on sm100"
    if spec.head_dim not in TILES or spec.value_dim != spec.head_dim:
        widths = ", ".join(map(str, TILES))
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} reads pages at {widths}, keys and values alike"
    elif page_size == tile(spec)[1]:
        why = "reads last pages to their end, where what another sequence left (a NaN) would reach the output"
        yield f"page_size={page_size} with head_dim={spec.head_dim}: {name} {why}"


def forward(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, entry: Callable[..., Any], settings: dict[str, Any]
) -> tuple[Any, Any]:
    """(out, lse). The queries are packed, also where each sequence has one; a call takes no offsets of keys.

    Args:
        entry: flash-attn-4's ``_flash_attn_fwd``; settings: its keywords that are no tensors.
    """
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    out, lse = (None, None) if into is None else map(writable, into)
    found = entry(
        *(readable(inputs.q), k, v),
        cu_seqlens_q=query_offsets(spec, inputs),
        seqused_k=lengths,
        page_table=table,
        tile_mn=tile(spec),
        return_lse=True,
        out=out,
        lse=lse,
        **settings,
    )
    return found[0], found[1]
