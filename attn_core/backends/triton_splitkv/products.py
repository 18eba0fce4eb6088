"""Products of tiles of queries and keys, and of weights and values, in the orientation that wastes fewest rows.

The tensor cores multiply 16 rows by 8 columns at once. A tile of 8 queries would leave half of 16 rows empty, so its
products are turned around: keys and channels are the rows, and queries are the columns. The results are turned back,
which moves no data.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attn_core.backends.shared.in_order.loads import read
from attn_core.backends.triton_splitkv import shares

TURNED_ROWS = tl.constexpr(shares.TURNED_ROWS)


@triton.jit
def multiply(rows, columns, added):
    """Returns the product of rows ``[n, k]`` and columns ``[k, m]``, plus ``[n, m]``; float32.

    If n is TURNED_ROWS, columns are ``[m, k]``.
    """
    if rows.shape[0] == TURNED_ROWS:
        return tl.trans(tl.dot(columns, tl.trans(rows), tl.trans(added)))
    else:
        return tl.dot(rows, columns, added)


@triton.jit
def read_keys(address, channel, slots, is_key, ALL: tl.constexpr, ROWS: tl.constexpr):
    """Reads channels of keys at slots, as columns of a product with ROWS queries. ALL: every key exists.

    Larger tiles are read like values, so that a thread finds the page of a slot once for both.
    """
    tile = _read_tile(address, channel, slots, is_key, ALL, True)
    return tile if ROWS == TURNED_ROWS else tl.trans(tile)


@triton.jit
def read_values(address, channel, slots, is_key, ALL: tl.constexpr, ROWS: tl.constexpr):
    """Reads channels of values at slots, as columns of a product with the weights of ROWS queries."""
    return _read_tile(address, channel, slots, is_key, ALL, ROWS != TURNED_ROWS)


@triton.jit
def _read_tile(address, channel, slots, is_key, ALL: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Reads ``[keys, channels]`` with KEYS_FIRST, else ``[channels, keys]``."""
    if KEYS_FIRST:
        tile = read(address + slots[:, None] + channel[None, :], is_key[:, None], ALL)
    else:
        tile = read(address + slots[None, :] + channel[:, None], is_key[None, :], ALL)
    return tile
