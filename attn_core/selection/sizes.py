"""The sizes of a call: how much a kernel computes and reads, as positive numbers.

A cost model multiplies each size by a rate (cost_model.py). Kernels cut a call into tiles: of queries in the forward,
of keys in the backward. Processors work on whole tiles, so the last tiles may leave processors idle. Several sizes
count the same work under different assumptions about tiles, and a fit finds out which of them describes a kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attn_core.call.arithmetic import banded_pairs
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.selection.features import NO_WINDOW, longest

COMMON_WIDTHS = (64, 128, 192, 256)
"""Head dims that every kernel reads as they are."""

FILLED = 1.6
"""Tiles for each processor from which on kernels do not split the keys of a decoding call among processors."""


BLOCK = 128
"""Queries that plain attention computes at a time, one block after another (``plain_attention.QUERY_BLOCK``)."""


class Sizes(NamedTuple):
    """How much a call computes and reads, in units that make most rates a few microseconds.

    "Products" are the visible pairs of queries and keys, times the widths of both head dims.

    Attributes:
        constant: 1, for what a kernel takes whatever the size.
        fine_work, work: products, counted in tiles of half as many queries, and in tiles (1e9).
        waves, coarse_waves: the same if processors take whole tiles, and tiles one and a half times as high (1e9).
        grouped_work, grouped_waves: work and waves if the query heads of a key/value head share a tile (1e9).
        chain: products of the longest single tile, which no number of processors makes shorter (1e6).
        steps, grouped_steps: keys that a processor passes over, one tile after another (1e3).
        key_waves, key_chain, key_steps: waves, chain and steps for tiles of keys, as in the backward.
        rectangle: products of all pairs, also the hidden ones (1e9).
        scores: visible pairs (1e8).
        tiles: that a kernel launches: as many for each row, or packed document, as for the longest (1e4).
        search: the same, times the packed documents among which a tile may look for its own (1e6).
        unsplit: fine work of decoding if the tiles fill the device, so that kernels do not split the keys (1e9).
        memory: bytes of q, k, v and the output (1e8).
        query_memory: bytes of q and the output (1e8).
        padded_memory: memory if the head dim is not one that every kernel has (1e8).
        expanded_memory: bytes of keys and values if each query head has its own, for grouped heads (1e8).
        mask_memory: elements of mask and bias (1e7).
        dense_scores: pairs, also hidden ones, if the call has a mask or bias (1e8).
        blocks: of queries, if all heads and rows of the batch share a block (10).
        across: pairs, also of different packed documents; 0 without any (1e8).
        key_tiles: that a backward launches: as many for each row, or packed document, as for the longest (1e4).
    """

    constant: float
    fine_work: float
    work: float
    waves: float
    coarse_waves: float
    grouped_work: float
    grouped_waves: float
    chain: float
    steps: float
    grouped_steps: float
    key_waves: float
    key_chain: float
    key_steps: float
    rectangle: float
    scores: float
    tiles: float
    search: float
    unsplit: float
    memory: float
    query_memory: float
    padded_memory: float
    expanded_memory: float
    mask_memory: float
    dense_scores: float
    blocks: float
    across: float
    key_tiles: float


def sizes_of_call(spec: AttentionSpec, tile: int, processors: int) -> Sizes:
    """Returns the sizes of a call on a device.

    The lengths of packed documents are on the device. The host knows their number and the longest, so all count as long
    as the geometric mean of the longest and the average one.

    Args:
        tile: queries that a kernel works on at a time.
        processors: tiles that the device works on at a time.
    """
    longest_q, longest_k = longest(spec)
    queries, keys = _typical(spec, longest_q, longest_k)
    heads, kv_heads = spec.batch * spec.num_heads, spec.batch * spec.num_kv_heads
    width = spec.head_dim + spec.value_dim
    tokens = max(1, spec.q_len)
    pairs = banded_pairs(band(spec, queries, keys), queries, keys)
    # The keys that a query sees, and the queries that see a key, on average.
    seen, seeing = pairs / max(1, queries), pairs / max(1, keys)
    banded = spec.causal or spec.window != NO_WINDOW
    half, coarse = tile // 2, tile * 3 // 2
    # A tile also computes the hidden pairs on the diagonal.
    fine_keys = tile_keys = coarse_keys = seen
    tile_queries = seeing
    if banded:
        fine_keys, tile_keys = min(keys, seen + half / 2), min(keys, seen + half)
        coarse_keys = min(keys, seen + coarse / 2)
        tile_queries = min(queries, seeing + half)
    rows = max(1.0, tokens / max(1, queries))  # rows of the batch, or packed documents
    group = spec.num_heads // spec.num_kv_heads
    fine = heads * rows * -(-queries // half)
    tiles = heads * rows * -(-queries // tile)
    coarse_tiles = heads * rows * -(-queries // coarse)
    grouped = kv_heads * rows * -(-queries * group // tile)
    key_tiles = heads * rows * -(-keys // tile)
    per_tile, giga = tile * tile_keys * width * 1e-9, width * 1e-9
    waves, grouped_waves, key_waves = -(-tiles // processors), -(-grouped // processors), -(-key_tiles // processors)
    coarse_waves = -(-coarse_tiles // processors) * processors
    # Tiles at the start of a band are shorter than tiles at its end, so the last ones fill gaps.
    uneven = banded and queries > tile
    alone = fine if queries > 1 else kv_heads * rows * -(-group // half)  # one query shares a tile with its group
    filled = longest_q <= half and alone >= FILLED * processors
    documents = spec.documents or 1
    launched = heads * documents * -(-longest_q // tile)
    dense = spec.mask_shape is not None or spec.bias_shape is not None
    rectangle = heads * spec.q_len * spec.kv_len * 1e-8
    byte_width = (2e-8 if spec.dtype in ("bfloat16", "float16") else 4e-8) * width
    memory = byte_width * (heads * tokens + kv_heads * spec.kv_len)
    return Sizes(
        1.0,
        fine * half * fine_keys * giga,
        tiles * per_tile,
        (tiles if uneven else waves * processors) * per_tile,
        (coarse_tiles if banded and queries > coarse else coarse_waves) * coarse * coarse_keys * giga,
        grouped * per_tile,
        (grouped if uneven else grouped_waves * processors) * per_tile,
        tile * min(longest_k, 2 * tile_keys) * width * 1e-6,
        waves * tile_keys * 1e-3,
        grouped_waves * tile_keys * 1e-3,
        key_waves * processors * tile * tile_queries * giga,
        tile * min(longest_q, 2 * seeing + half) * width * 1e-6,
        key_waves * tile_queries * 1e-3,
        heads * rows * queries * keys * giga,
        heads * rows * pairs * 1e-8,
        launched * 1e-4,
        launched * documents * 1e-6 if spec.documents else 0.0,
        alone * half * seen * giga if filled else 0.0,
        memory,
        byte_width * heads * tokens,
        0.0 if spec.head_dim in COMMON_WIDTHS else memory,
        byte_width * heads * spec.kv_len if group > 1 else 0.0,
        (_elements(spec.mask_shape) + _elements(spec.bias_shape)) * 1e-7 if dense else 0.0,
        rectangle if dense else 0.0,
        -(-spec.q_len // BLOCK) * 0.1,
        rectangle if spec.documents else 0.0,
        heads * documents * -(-longest_k // tile) * 1e-4,
    )


def _typical(spec: AttentionSpec, queries: int, keys: int) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of a typical packed document, by the longest."""
    if not spec.documents:
        return queries, keys
    lengths = ((queries, spec.q_len), (keys, spec.kv_len))
    q, k = (round(math.sqrt(most * min(most, tokens / spec.documents))) for most, tokens in lengths)
    return max(1, q), max(1, k)


def _elements(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else math.prod(shape)
