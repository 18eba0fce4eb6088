"""The pools of pages as data: how many pages fit into memory, and the layouts of other libraries, as views.

Our pools are ``[num_pages, page_size, kv_heads, dim]``, so a view of another layout only has other strides.
Sources: FlashInfer's documentation of ``kv_layout``; ``get_kv_cache_shape`` of vLLM's attention backends; the shapes in
jax.experimental.pallas.ops.tpu.ragged_paged_attention and paged_attention of jax 0.10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

import numpy as np

from attn_core.call import spec
from attn_core.call.kinds import MOST, check_size, is_host_int
from attn_core.call.spec import FLOAT_BITS
from attn_core.errors import DTypeError, ShapeError, SpecError, shown

BITS = {**FLOAT_BITS, **spec.BITS}
"""The bits of an element, by dtype."""

SCALED = tuple(spec.BITS)
"""Dtypes that need a scale, float32, for each token and head, of the key and of the value."""


class PoolSizes(TypedDict):
    """The sizes of the pools of a ``PagedKVCache``, for every layer the same."""

    page_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    value_dim: NotRequired[int | None]


def bytes_per_token(
    *, num_layers: int, kv_heads: int, head_dim: int, value_dim: int | None = None, dtype: str = "float32"
) -> int:
    """Returns the bytes of the keys and values of one token in all layers, with their scales.

    Args:
        value_dim: the channels of a value; ``head_dim`` if None.
        dtype: of the pools, one of ``BITS``. ``"float8_e4m3fn"``, ``"int8"`` and ``"int4"`` count float32 scales for
            each token and head.

    Raises:
        SpecError: for a size below 1. DTypeError: for another dtype.
    """
    dims = {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
    for name, value in {"num_layers": num_layers, "kv_heads": kv_heads, **dims}.items():
        check_size(name, value, 1)
    if not isinstance(dtype, str) or dtype not in BITS:
        raise DTypeError(f"dtype={shown(dtype)}: expected one of {', '.join(BITS)}")
    sizes = int(kv_heads), (int(dims["head_dim"]), int(dims["value_dim"]))
    return int(num_layers) * int(spec.bytes_in_layer(dtype, *sizes, 1 if dtype in SCALED else 0))


def pages_that_fit(
    memory: int,
    *,
    page_size: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: str = "float32",
) -> int:
    """Returns how many pages fit into ``memory`` bytes: the ``num_pages`` of a ``PagedKVCache`` of these sizes.

    Args:
        memory: bytes.
        page_size: tokens in a page. num_layers to dtype are those of ``bytes_per_token``.

    Raises:
        SpecError: for less memory than a page needs, or a size below 1. DTypeError: for another dtype.
    """
    token = bytes_per_token(
        num_layers=num_layers, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype
    )
    check_size("page_size", page_size, 1)
    page = int(page_size) * token
    if not is_host_int(memory) or memory < page:
        raise SpecError(f"memory={shown(memory)}: expected at least the {page} bytes of one page, as an int")
    return min(int(memory) // page, MOST)


def part_of(free: int, fraction: float) -> int:
    """Returns a fraction of free bytes. Raises SpecError unless it is a number above 0 and at most 1."""
    if not isinstance(fraction, int | float | np.number) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        raise SpecError(f"fraction={shown(fraction)}: expected a number above 0 and at most 1")
    return int(free * fraction)


OURS = ("pages", "size", "heads", "dim")
"""The axes of ``k_pages`` and ``v_pages``."""
BOTH = "2"
"""The axis that has the keys at 0 and the values at 1."""
MIXED = "2 * heads"
"""The axis that has the keys of a head, then its values, then those of the next head."""

Axes = tuple[str, ...]
PAIRS: dict[str, Axes] = {
    "NHD": OURS,
    "HND": ("pages", "heads", "size", "dim"),
    "vllm": OURS,
    "heads_first": ("heads", "pages", "size", "dim"),
}
"""The axes of a pool of keys, and of one of values, by the name of their layout."""
SINGLE: dict[str, tuple[Axes, ...]] = {
    "NHD": (("pages", BOTH, "size", "heads", "dim"),),
    "HND": (("pages", BOTH, "heads", "size", "dim"),),
    "vllm": (("pages", BOTH, "size", "heads", "dim"), (BOTH, "pages", "size", "heads", "dim")),
    "interleaved": (("pages", "size", MIXED, "dim"),),
}
"""The axes of one array with keys and values, by the name of the layout; vLLM has had two."""
LAYOUTS = tuple(dict.fromkeys((*PAIRS, *SINGLE)))


def pages_of(
    cache: Any, layout: object, check: Callable[[str, Any], object], ordered: Callable[[Any, tuple[int, ...]], Any]
) -> tuple[Any, Any]:
    """Returns a pool of another library as ``(k_pages, v_pages)``, ``[num_pages, page_size, kv_heads, dim]``.

    Axes by layout, as a pair of arrays and as one array:

    - ``"NHD"``: ``[pages, size, heads, dim]``; ``[pages, 2, size, heads, dim]`` (FlashInfer).
    - ``"HND"``: ``[pages, heads, size, dim]``; ``[pages, 2, heads, size, dim]`` (FlashInfer).
    - ``"vllm"``: ``[blocks, size, heads, dim]``; ``[blocks, 2, size, heads, dim]`` or ``[2, blocks, ...]``, whichever
      has the axis of 2.
    - ``"interleaved"``: only as one array, ``[pages, size, 2 * heads, dim]``, keys at even heads (JAX's
      ragged_paged_attention).
    - ``"heads_first"``: only as a pair, ``[heads, pages, size, dim]`` (JAX's paged_attention).

    Args:
        cache: one array with keys and values, or a pair of arrays, whose dims may differ.
        layout: one of the names above.
        check: raises an error that names an argument unless it is an array of the frontend.
        ordered: returns an array with its axes in this order.

    Raises:
        SpecError: for an unknown layout, or one that the cache's form does not have.
        ShapeError: for a shape that is not of the layout, or that fits two orders of the axes.
        TypeError: for a cache that is neither an array nor a pair of arrays.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise SpecError(f"layout={shown(layout)}: expected one of {', '.join(map(repr, LAYOUTS))}")
    if not (isinstance(cache, tuple | list) and len(cache) == 2):
        check("cache", cache)
        axes = _axes_of_one(layout, tuple(cache.shape))
        # Where the keys are, and where the values are.
        at = axes.index(MIXED if MIXED in axes else BOTH)
        halves = (slice(0, None, 2), slice(1, None, 2)) if MIXED in axes else (0, 1)
        names = [name.removeprefix("2 * ") for name in axes if name != BOTH]
        order = tuple(map(names.index, OURS))
        keys, values = (ordered(cache[(*(slice(None),) * at, half)], order) for half in halves)
        return keys, values
    pools = []
    for name, pool in zip(("cache[0]", "cache[1]"), cache, strict=True):
        check(name, pool)
        if layout not in PAIRS:
            raise SpecError(f"layout={layout!r}: expected one array with keys and values, got two")
        axes = PAIRS[layout]
        if len(pool.shape) != len(axes):
            raise ShapeError(f"{name}: expected {_text(axes)} for layout={layout!r}, got shape {list(pool.shape)}")
        pools.append(ordered(pool, tuple(map(axes.index, OURS))))
    return pools[0], pools[1]


def _axes_of_one(layout: str, shape: tuple[int, ...]) -> Axes:
    """Returns the axes of one array with keys and values. Raises an error unless its shape fits one order of them."""
    choices = SINGLE.get(layout)
    if choices is None:
        raise SpecError(f"layout={layout!r}: expected a pair (keys, values), got one array of shape {list(shape)}")
    fitting = [axes for axes in choices if _fits(axes, shape)]
    if not fitting:
        expected = " or ".join(map(_text, choices))
        raise ShapeError(f"cache: expected {expected} for layout={layout!r}, got shape {list(shape)}")
    if len(fitting) > 1:
        raise ShapeError(
            f"cache: expected a shape that tells the pages from the keys and values, got {list(shape)}; pass "
            f"layout='NHD' if the pages come first, or the pair (cache[0], cache[1])"
        )
    return fitting[0]


def _fits(axes: Axes, shape: tuple[int, ...]) -> bool:
    if len(shape) != len(axes):
        return False
    return shape[axes.index(BOTH)] == 2 if BOTH in axes else shape[axes.index(MIXED)] % 2 == 0


def _text(axes: Axes) -> str:
    return f"[{', '.join(axes)}]"
