"""The matrix products of ``fixed_tiles``: each has the shape of a whole tile.

A product is never of one matrix alone: a lone head is multiplied twice. The library gives each of several matrices to
one thread. One alone it may share among threads, or multiply by a loop for vectors, in another order of sums.
"""

from __future__ import annotations

from typing import Any

from attn_core.backends.math.tile_operands import Tiles
from attn_core.backends.shared.plain import contained_sums


def tile_products(rows: Any, matrix: Any, out: Any = None) -> Any:
    """``[batch * kv_heads, group, QUERY_TILE, a]`` times ``[batch * kv_heads, a, b]``. out: memory to write into."""
    several = _several(rows, matrix)
    return contained_sums.products(several[0][:, None], several[1][:, None], out)[: len(rows), 0]


def over_keys(weights: Any, values: Any, tiles: Tiles, hidden: Any) -> Any:
    """Sums values ``[batch * kv_heads, KEY_TILE, dim]`` over the keys of a tile; a NaN reaches who sees it."""
    hidden = None if tiles.finite or hidden is None else hidden[:, None]
    several = _several(weights, values)
    return contained_sums.sum_over_keys(several[0][:, None], several[1][:, None], hidden)[: len(weights), 0]


def over_rows(weights: Any, rows: Any, tiles: Tiles, hidden: Any) -> Any:
    """Sums rows ``[batch * kv_heads, group, QUERY_TILE, dim]`` over group and queries of a tile."""
    hidden = None if tiles.finite or hidden is None else hidden[:, None]
    several = _several(weights, rows)
    return contained_sums.sum_over_rows(several[0][:, None], several[1][:, None], hidden)[: len(weights), 0]


def _several(*operands: Any) -> tuple[Any, ...]:
    """Returns operands of products of at least two matrices, as views."""
    return operands if len(operands[0]) > 1 else tuple(each.expand(2, *each.shape[1:]) for each in operands)
