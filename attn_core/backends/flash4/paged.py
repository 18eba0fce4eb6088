"""FlashAttention-4 on paged keys and values: refusals and the call.

Its Hopper kernel reads pages in one of two ways. If a page is exactly one tile of keys, it loads the whole tile, also
the rows after the end of the sequence: they are masked, but 0 * NaN is NaN. It reads any other page row by row, with
zeros after the end (``cp.async`` with a size of 0, seen in the compiled code). We allow only the second way. The tiles
are flash-attn-4's own choice; we pass them explicitly, so that a later version cannot choose a tile of a page's size.
At head_dim 96 the kernel copies rows 32 at a time into tiles of 144, so half a copy lies after the tile; the widths
below are those whose tiles are whole copies.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: interface.py, flash_fwd_sm90.py, paged_kv.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attn_core.backends.flash4.operands import window, writable
from attn_core.backends.shared.pages.pools import pools, query_offsets, safe_tables
from attn_core.backends.shared.rewrites import readable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs

TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}
"""By head dimension, the number of queries and keys in a tile."""
WINDOWED_KEYS = {256: 64}
"""By head dimension, the number of keys in a tile of a call with a window, if it differs."""


def tile(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the (queries, keys) of a tile, for a call that ``refusals`` allows."""
    (queries, keys), (left, right) = TILES[spec.head_dim], window(spec)
    windowed = left is not None or right not in (None, 0)
    return queries, WINDOWED_KEYS.get(spec.head_dim, keys) if windowed else keys


def refusals(spec: AttentionSpec, device: str, name: str) -> Iterator[str]:
    """Yields refusals of key ranges, sm100, widths, and the page size per width that the kernel reads past the end."""
    page_size = spec.paged.page_size if spec.paged else 0
    if spec.key_ranges_shape is not None:
        yield f"key_ranges of shape {list(spec.key_ranges_shape)}: {name} does not take them with keys in pages"
    if device == "sm100":
        yield f"keys and values in pages of {page_size}: {name} is not claimed for them on sm100"
    if spec.head_dim not in TILES or spec.value_dim != spec.head_dim:
        widths = ", ".join(map(str, TILES))
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} reads pages at {widths}, keys and values alike"
    elif page_size == tile(spec)[1]:
        why = "reads last pages to their end, so a NaN left there by another sequence would reach the output"
        yield f"page_size={page_size} with head_dim={spec.head_dim}: {name} {why}"


def forward(
    spec: AttentionSpec, inputs: PagedInputs, into: Any, entry: Callable[..., Any], settings: dict[str, Any]
) -> tuple[Any, Any]:
    """Returns (out, lse). The queries are always packed, even with one query per sequence.

    Args:
        entry: flash-attn-4's ``_flash_attn_fwd``. settings: its keywords that are no tensors.
    """
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    out, lse = (None, None) if into is None else map(writable, into)
    results = entry(
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
    return results[0], results[1]
