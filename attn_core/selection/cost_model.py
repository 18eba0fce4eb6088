"""The time of a call on each backend, by a model that was fitted to measured times.

For one backend and direction, in microseconds::

    time = max(host, constant + work * ... + memory * ...)

``host`` is the time until the call returns. Each size of the call (``Sizes``) has a rate. The call's ``Kind``
multiplies the rates by effects: a softcap, say, makes every score slower. The parameters are logarithms, so that rates
are positive and effects multiply. The effects on the host add up instead: what it does for sinks takes as long whether
or not documents are packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import NamedTuple

import numpy as np

from attn_core.call.arithmetic import banded_pairs
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FEW_QUERIES = 16
"""A row with at most this many queries is decoding: its speed depends on splitting the keys, not on tiling queries."""

SHORT = 64
"""A row with at most this many queries fills no tile: kernels differ in how they split its keys among processors."""

WIDTHS = (32, 64, 96, 128, 192, 256)
"""The widths that kernels are compiled for; a head_dim belongs to the first that is not smaller."""

COMMON_WIDTHS = (64, 128, 192, 256)
"""Head dims that every kernel reads as they are."""

FILLED = 1.6
"""Tiles for each processor from which on kernels do not split the keys of a decoding call among processors."""

BLOCK = 128
"""Queries that plain attention computes at a time, one block after another (``plain_attention.QUERY_BLOCK``)."""

NO_WINDOW = (None, None)


class Kind(NamedTuple):
    """The properties of a call that change how fast a kernel works, whatever the size."""

    training: bool  # whether the gradients are computed, too
    width: int  # the first of WIDTHS that both head dims fit in; the wider head dim if none
    padded: bool  # whether kernels for WIDTHS pad the head dim
    narrow_values: bool  # whether the values are narrower than the keys
    dtype: str  # of q, k and v
    band: str  # "full" (nothing is hidden, whatever the options are), "causal" or "window"
    decode: bool  # whether each row, or each packed document, has at most FEW_QUERIES queries
    one_query: bool  # whether each row of a call without packed documents has one query
    grouped: bool
    softcap: bool
    alibi: bool
    sinks: bool
    packed: bool
    mask: str  # "" for none, "keys" if all queries share one row of it, else "scores"
    bias: str  # the same
    ragged: bool  # whether the rows of a mask or bias have no whole eights of keys: some kernels then need a copy
    short: bool  # whether each row, or each packed document, has more than FEW_QUERIES and at most SHORT queries


def kind_of_call(spec: AttentionSpec) -> Kind:
    """Returns the kind of a call."""
    wide = max(spec.head_dim, spec.value_dim)
    width = next((limit for limit in WIDTHS if wide <= limit), wide)
    queries, keys = longest(spec)
    return Kind(
        training=spec.needs_backward,
        width=width,
        padded=wide != width,
        narrow_values=spec.value_dim < spec.head_dim,
        dtype=spec.dtype,
        band=_band(spec, queries, keys),
        decode=queries <= FEW_QUERIES,
        one_query=spec.q_len == 1 and spec.documents is None,
        grouped=spec.num_heads != spec.num_kv_heads,
        softcap=spec.softcap is not None,
        alibi=spec.alibi_shape is not None,
        sinks=spec.sinks,
        packed=spec.documents is not None,
        mask=_rows(spec.mask_shape),
        bias=_rows(spec.bias_shape),
        ragged=is_ragged(spec),
        short=FEW_QUERIES < queries <= SHORT,
    )


def is_ragged(spec: AttentionSpec) -> bool:
    """Returns whether the rows of a call's mask or bias have no whole eights of keys."""
    return spec.kv_len % 8 != 0 and not (spec.mask_shape is None and spec.bias_shape is None)


def longest(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of the longest packed document."""
    if spec.documents is None:
        return spec.q_len, spec.kv_len
    return spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len


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


class Sizes(NamedTuple):
    """How much a call computes and reads, in units that make most rates a few microseconds.

    Kernels cut a call into tiles: of queries in the forward, of keys in the backward. Processors work on whole tiles,
    so the last tiles may leave processors idle. Several sizes count the same work under different assumptions about
    tiles, and a fit finds out which of them describes a kernel. "Products" are the visible pairs of queries and keys,
    times the widths of both head dims.
    """

    constant: float  # 1, for what a kernel takes whatever the size
    fine_work: float  # products, counted in tiles of half as many queries (1e9)
    work: float  # products, counted in tiles (1e9)
    waves: float  # the same if processors take whole tiles (1e9)
    coarse_waves: float  # the same for tiles one and a half times as high (1e9)
    grouped_work: float  # work if the query heads of a key/value head share a tile (1e9)
    grouped_waves: float  # waves if they do (1e9)
    chain: float  # products of the longest single tile, which no number of processors makes shorter (1e6)
    steps: float  # keys that a processor passes over, one tile after another (1e3)
    grouped_steps: float  # the same if query heads share a tile (1e3)
    key_waves: float  # waves for tiles of keys, as in the backward (1e9)
    key_chain: float  # chain for tiles of keys (1e6)
    key_steps: float  # steps for tiles of keys (1e3)
    rectangle: float  # products of all pairs, also the hidden ones (1e9)
    scores: float  # visible pairs (1e8)
    tiles: float  # that a kernel launches: as many for each row, or packed document, as for the longest (1e4)
    search: float  # the same, times the packed documents among which a tile may look for its own (1e6)
    unsplit: float  # fine work of decoding if the tiles fill the device, so that kernels do not split the keys (1e9)
    memory: float  # bytes of q, k, v and the output (1e8)
    query_memory: float  # bytes of q and the output (1e8)
    padded_memory: float  # memory if the head dim is not one that every kernel has (1e8)
    expanded_memory: float  # bytes of keys and values if each query head has its own, for grouped heads (1e8)
    mask_memory: float  # elements of mask and bias (1e7)
    dense_scores: float  # pairs, also hidden ones, if the call has a mask or bias (1e8)
    blocks: float  # of queries, if all heads and rows of the batch share a block (10)
    across: float  # pairs, also of different packed documents; 0 without any (1e8)
    key_tiles: float  # that a backward launches: as many for each row, or packed document, as for the longest (1e4)


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
        constant=1.0,
        fine_work=fine * half * fine_keys * giga,
        work=tiles * per_tile,
        waves=(tiles if uneven else waves * processors) * per_tile,
        coarse_waves=(coarse_tiles if banded and queries > coarse else coarse_waves) * coarse * coarse_keys * giga,
        grouped_work=grouped * per_tile,
        grouped_waves=(grouped if uneven else grouped_waves * processors) * per_tile,
        chain=tile * min(longest_k, 2 * tile_keys) * width * 1e-6,
        steps=waves * tile_keys * 1e-3,
        grouped_steps=grouped_waves * tile_keys * 1e-3,
        key_waves=key_waves * processors * tile * tile_queries * giga,
        key_chain=tile * min(longest_q, 2 * seeing + half) * width * 1e-6,
        key_steps=key_waves * tile_queries * 1e-3,
        rectangle=heads * rows * queries * keys * giga,
        scores=heads * rows * pairs * 1e-8,
        tiles=launched * 1e-4,
        search=launched * documents * 1e-6 if spec.documents else 0.0,
        unsplit=alone * half * seen * giga if filled else 0.0,
        memory=memory,
        query_memory=byte_width * heads * tokens,
        padded_memory=0.0 if spec.head_dim in COMMON_WIDTHS else memory,
        expanded_memory=byte_width * heads * spec.kv_len if group > 1 else 0.0,
        mask_memory=(_elements(spec.mask_shape) + _elements(spec.bias_shape)) * 1e-7 if dense else 0.0,
        dense_scores=rectangle if dense else 0.0,
        blocks=-(-spec.q_len // BLOCK) * 0.1,
        across=rectangle if spec.documents else 0.0,
        key_tiles=heads * documents * -(-longest_k // tile) * 1e-4,
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


EFFECTS: dict[str, Callable[[Kind], bool]] = {
    "width 32": lambda kind: kind.width == 32,
    "width 64": lambda kind: kind.width == 64,
    "width 96": lambda kind: kind.width == 96,
    "width 192": lambda kind: kind.width == 192,
    "width 256": lambda kind: kind.width >= 256,
    "padded width": lambda kind: kind.padded,
    "narrow values": lambda kind: kind.narrow_values,
    "float16": lambda kind: kind.dtype == "float16",
    "float32": lambda kind: kind.dtype in ("float32", "float64"),
    "causal": lambda kind: kind.band == "causal",
    "window": lambda kind: kind.band == "window",
    "decode": lambda kind: kind.decode,
    "one query": lambda kind: kind.one_query,
    "grouped": lambda kind: kind.grouped,
    "softcap": lambda kind: kind.softcap,
    "alibi": lambda kind: kind.alibi,
    "sinks": lambda kind: kind.sinks,
    "packed": lambda kind: kind.packed,
    "mask of keys": lambda kind: kind.mask == "keys",
    "mask of scores": lambda kind: kind.mask == "scores",
    "bias": lambda kind: bool(kind.bias),
    "mask or bias, banded": lambda kind: bool(kind.mask or kind.bias) and kind.band != "full",
    "mask or bias, grouped": lambda kind: bool(kind.mask or kind.bias) and kind.grouped,
    "ragged mask": lambda kind: kind.ragged,
    "short": lambda kind: kind.short,
    "float32, grouped": lambda kind: kind.grouped and kind.dtype == "float32",
}
"""The properties of a kind that change rates."""

RATES = ("host", *Sizes._fields)
"""The rates of a model; the host's is a time."""

GROUPS: dict[str, tuple[str, ...]] = {
    "host": ("host",),
    "constant": ("constant", "tiles", "key_tiles", "search", "blocks"),
    "compute": (
        "fine_work",
        "work",
        "waves",
        "coarse_waves",
        "grouped_work",
        "grouped_waves",
        "chain",
        "steps",
        "grouped_steps",
        "key_waves",
        "key_chain",
        "key_steps",
        "rectangle",
        "scores",
        "unsplit",
        "across",
    ),
    "memory": ("memory", "query_memory", "padded_memory", "expanded_memory"),
    "masks": ("mask_memory", "dense_scores"),
}
"""Groups of rates that an effect multiplies alike."""

SINGLE = ("causal", "window", "decode", "one query", "packed")
"""Effects that also multiply each rate alone: such calls are tiled differently, so another size limits a kernel."""

_of_groups = [(name, effect, tuple(map(RATES.index, each))) for name, each in GROUPS.items() for effect in EFFECTS]
_of_rates = [(f"only {rate}", effect, (at,)) for effect in SINGLE for at, rate in enumerate(RATES) if at > 1]
FACTORS: tuple[tuple[str, str, tuple[int, ...]], ...] = (*_of_groups, *_of_rates)
"""The factors of a model: (name of a group or rate, effect, places in RATES that it multiplies)."""

LEAST_HOST = 0.25
"""The least host time of a kind, as a share of the host's rate, however many effects make it shorter."""


class Model(NamedTuple):
    """The fitted parameters of one backend in one direction."""

    rates: tuple[float, ...]  # the logarithms of RATES, for a call without any of EFFECTS
    # the logarithms of FACTORS. A factor of the host says what one effect alone would multiply it by.
    factors: tuple[float, ...]
    error: float = 0.0  # the root mean square error of log time over calls that the fit did not see


class Models:
    """The models of several backends as arrays, because a new kind of call needs the rates of all of them."""

    def __init__(self, models: Sequence[Model], multiples: Sequence[float]) -> None:
        """Stacks the models. The rates of each are multiplied by its number in ``multiples``."""
        rates = np.array([model.rates for model in models]).reshape(len(models), len(RATES))
        self._base = rates + np.log(np.array(multiples)).reshape(len(models), 1)  # [models, RATES], logarithms
        names = list(EFFECTS)
        effects = np.zeros((len(EFFECTS), len(models), len(RATES)))  # logarithms, too
        for number, (_, name, places) in enumerate(FACTORS):
            values = np.array([model.factors[number] for model in models])
            effects[names.index(name)][:, places] += values[:, None]
        self._effects = effects

    def of_kind(self, kind: Kind) -> list[list[float]]:
        """Returns each model's rates for a kind of call, in microseconds, in the order of RATES."""
        effects = self._effects[[place for place, applies in enumerate(EFFECTS.values()) if applies(kind)]]
        logarithms = self._base + effects.sum(0)
        # Column 0 is the host, whose effects add up instead of multiplying.
        logarithms[:, 0] = self._base[:, 0] + np.log(host_multiple(effects[:, :, 0].T))
        rates: list[list[float]] = np.exp(logarithms).tolist()
        return rates


def host_multiple(factors: np.ndarray) -> np.ndarray:
    """Returns how many times the host's rate the host takes, by the logarithms of its factors along the last axis."""
    multiple: np.ndarray = np.maximum(LEAST_HOST, 1.0 + np.expm1(factors).sum(-1))
    return multiple


def microseconds(model: Model, kind: Kind, sizes: Sizes, host_weight: float = 1.0) -> float:
    """Returns the time of a call by one model; the host's time counts ``host_weight`` times."""
    ((host, *rates),) = Models([model], [1.0]).of_kind(kind)
    return max(host_weight * host, sum(map(mul, rates, sizes)))
