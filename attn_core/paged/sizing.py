"""The number of pages that fit into memory, from the bytes of a token."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np

from attn_core.call import spec
from attn_core.call.kinds import MOST, check_size, is_host_int
from attn_core.call.spec import FLOAT_BITS
from attn_core.errors import DTypeError, SpecError, shown

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
