"""The properties of a call that decide how long a kernel takes: its kind, and its sizes as positive numbers.

A cost model multiplies each size by a rate, and the kind of the call changes the rates (cost_model.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from attn_core.call.arithmetic import banded_pairs
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FEW_QUERIES = 16
"""A row with at most this many queries is decoding: its speed depends on splitting the keys, not on tiling queries."""

WIDTHS = (32, 64, 96, 128, 192, 256)
"""The widths that kernels are compiled for; a head_dim belongs to the first that is not smaller."""


NO_WINDOW = (None, None)


COMMON_WIDTHS = (64, 128, 192, 256)
"""Head dims that every kernel reads as they are."""


class Kind(NamedTuple):
    """The properties of a call that change how fast a kernel works, whatever the size.

    Attributes:
        training: whether the gradients are computed, too.
        width: the first of WIDTHS that both head dims fit in; the wider head dim if none.
        padded: whether kernels for WIDTHS pad the head dim.
        narrow_values: whether the values are narrower than the keys.
        dtype: of q, k and v.
        band: "full" (nothing is hidden, whatever the options are), "causal" or "window".
        decode: whether each row, or each packed document, has at most FEW_QUERIES queries.
        one_query: whether each row of a call without packed documents has one query.
        grouped, softcap, alibi, sinks, packed: whether the call has the feature.
        mask, bias: "" for none, "keys" if all queries share one row of it, else "scores".
    """

    training: bool
    width: int
    padded: bool
    narrow_values: bool
    dtype: str
    band: str
    decode: bool
    one_query: bool
    grouped: bool
    softcap: bool
    alibi: bool
    sinks: bool
    packed: bool
    mask: str
    bias: str


class Sizes(NamedTuple):
    """How much a call computes and reads, in units that make most rates a few microseconds.

    Attributes:
        constant: 1, for what a kernel takes whatever the size.
        work: products of the visible pairs, counted in tiles of queries (1e9).
        waves: the same if every processor takes whole tiles, so that the last ones may wait (1e9).
        grouped_work: work if the query heads of a key/value head share a tile (1e9).
        chain: products of the longest single tile, which no number of processors makes shorter (1e6).
        rectangle: products of all pairs, also the hidden ones (1e9).
        scores: visible pairs, counted in tiles (1e8).
        tiles: that a kernel launches: as many for each row, or packed document, as for the longest (1e4).
        search: the same, times the packed documents among which a tile may look for its own (1e6).
        memory: bytes of q, k, v and the output (1e8).
        padded_memory: the same if the head dim is not one that every kernel has (1e8).
        expanded_memory: bytes of keys and values if each query head has its own, for grouped heads (1e8).
        mask_memory: elements of mask and bias (1e7).
        dense_scores: pairs, also hidden ones, if the call has a mask or bias (1e8).
    """

    constant: float
    work: float
    waves: float
    grouped_work: float
    chain: float
    rectangle: float
    scores: float
    tiles: float
    search: float
    memory: float
    padded_memory: float
    expanded_memory: float
    mask_memory: float
    dense_scores: float


def kind_of_call(spec: AttentionSpec) -> Kind:
    """Returns the kind of a call."""
    wide = max(spec.head_dim, spec.value_dim)
    width = next((limit for limit in WIDTHS if wide <= limit), wide)
    queries, keys = longest(spec)
    return Kind(
        spec.needs_backward,
        width,
        wide != width,
        spec.value_dim < spec.head_dim,
        spec.dtype,
        _band(spec, queries, keys),
        queries <= FEW_QUERIES,
        spec.q_len == 1 and spec.documents is None,
        spec.num_heads != spec.num_kv_heads,
        spec.softcap is not None,
        spec.alibi_shape is not None,
        spec.sinks,
        spec.documents is not None,
        _rows(spec.mask_shape),
        _rows(spec.bias_shape),
    )


def sizes_of_call(spec: AttentionSpec, tile: int, processors: int) -> Sizes:
    """Returns the sizes of a call on a device.

    The lengths of packed documents are on the device. The host knows their number and the longest, so all count as long
    as the geometric mean of the longest and the average one.

    Args:
        tile: queries that a kernel works on at a time.
        processors: tiles that the device works on at a time.
    """
    queries, keys = _typical(spec)
    heads, kv_heads = spec.batch * spec.num_heads, spec.batch * spec.num_kv_heads
    width = spec.head_dim + spec.value_dim
    tokens = max(1, spec.q_len)
    # The keys that a query sees, on average.
    seen = banded_pairs(band(spec, queries, keys), queries, keys) / max(1, queries)
    # A tile also computes the hidden pairs on the diagonal.
    if spec.causal or spec.window != NO_WINDOW:
        seen = min(keys, seen + tile / 2)
    rows = max(1.0, tokens / max(1, queries))  # rows of the batch, or packed documents
    tiles = rows * -(-queries // tile)
    each = tile * seen * width
    group = spec.num_heads // spec.num_kv_heads
    grouped_tiles = kv_heads * rows * -(-queries * group // tile)
    documents = spec.documents or 1
    launched = heads * documents * -(-longest(spec)[0] // tile)
    dense = spec.mask_shape is not None or spec.bias_shape is not None
    size = 2 if spec.dtype in ("bfloat16", "float16") else 4
    memory = size * (heads * tokens + kv_heads * spec.kv_len) * width * 1e-8
    return Sizes(
        1.0,
        heads * tiles * each * 1e-9,
        -(-heads * tiles // processors) * processors * each * 1e-9,
        grouped_tiles * each * 1e-9,
        tile * min(longest(spec)[1], 2 * seen) * width * 1e-6,
        heads * rows * queries * keys * width * 1e-9,
        heads * tiles * tile * seen * 1e-8,
        launched * 1e-4,
        launched * documents * 1e-6 if spec.documents else 0.0,
        memory,
        0.0 if spec.head_dim in COMMON_WIDTHS else memory,
        size * heads * spec.kv_len * width * 1e-8 if group > 1 else 0.0,
        (_elements(spec.mask_shape) + _elements(spec.bias_shape)) * 1e-7 if dense else 0.0,
        heads * spec.q_len * spec.kv_len * 1e-8 if dense else 0.0,
    )


def longest(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of the longest packed document."""
    if spec.documents is None:
        return spec.q_len, spec.kv_len
    return spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len


def _typical(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of a typical packed document."""
    queries, keys = longest(spec)
    if not spec.documents:
        return queries, keys
    lengths = ((queries, spec.q_len), (keys, spec.kv_len))
    q, k = (round(math.sqrt(most * min(most, tokens / spec.documents))) for most, tokens in lengths)
    return max(1, q), max(1, k)


def _band(spec: AttentionSpec, queries: int, keys: int) -> str:
    if not spec.causal and spec.window == NO_WINDOW:
        return "full"
    # A window longer than the row hides nothing, so the call costs as much as one without it.
    edge = band(spec, queries, keys)
    if edge.hides_nothing(queries, keys):
        return "full"
    return "causal" if spec.causal and edge.left is None else "window"


def _rows(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "keys" if shape[2] == 1 else "scores"


def _elements(shape: tuple[int, ...] | None) -> int:
    return 0 if shape is None else math.prod(shape)
