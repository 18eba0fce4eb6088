"""Checks the sizes of a paged cache, and says how it stores a token."""

from __future__ import annotations

from typing import Any

from attn_core.call.pages import BITS, PagedKV, describe
from attn_core.call.seq_info import is_host_int
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError, shown

MOST_LAYERS_AND_CHANNELS = 2**16
"""No model comes near, and a larger number would fill the memory before anything else complains."""


def check_cache(dtype: str, **sizes: Any) -> None:
    """Checks the sizes and the dtype of a cache. Raises SpecError for a size below 1, DTypeError for the dtype."""
    for name, value in sizes.items():
        if not is_host_int(value) or value < 1:
            raise SpecError(f"{name}={shown(value)}: expected a number of 1 or more")
        if value > MOST_LAYERS_AND_CHANNELS:
            raise SpecError(f"{name}={shown(value)}: expected at most {MOST_LAYERS_AND_CHANNELS}")
    if dtype not in DTYPES:
        raise DTypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")


def stored_shape(kv_dtype: str | None, **dims: int) -> tuple[str, dict[str, int]]:
    """Returns the dtype of a cache's pool arrays, and the channels that they have by head_dim and value_dim.

    Args:
        kv_dtype: of quantised pages, or None; then the dtype is "".

    Raises:
        SpecError, ShapeError: for an unknown kv_dtype, and for odd channels that int4 cannot store.
    """
    if kv_dtype is None:
        return "", dims
    if not isinstance(kv_dtype, str) or kv_dtype not in BITS:
        raise SpecError(f"kv_dtype={shown(kv_dtype)}: expected one of {', '.join(BITS)}, or None for the dtype itself")
    if kv_dtype != "int4":
        return kv_dtype, dims
    for name, dim in dims.items():
        if dim % 2:
            raise ShapeError(f"{name}={dim}: expected an even number, because int4 pages have two channels a byte")
    return "uint8", {name: dim // 2 for name, dim in dims.items()}


def describe_cache(kv_dtype: str | None, page_size: int, kv_heads: int, dims: dict[str, int], dtype: str) -> str:
    """Returns how a cache stores a token, and in how many bytes."""
    scales = None if kv_dtype is None else "token"
    pool = PagedKV(num_pages=1, page_size=page_size, width=1, dtype=kv_dtype, scales=scales)
    return describe(pool, kv_heads, dims["head_dim"], dims["value_dim"], dtype)


def check_layer(layer: Any, layers: int) -> int:
    """Returns the index of a cache's layer. Raises SpecError if the cache has no such layer."""
    # A negative index would silently select a layer from the end.
    if not is_host_int(layer) or not 0 <= layer < layers:
        raise SpecError(f"layer={shown(layer)}: expected a number from 0 to {layers - 1}, one of the cache's layers")
    return int(layer)
