"""The order of a row's sums over its keys, and the launches that keep it."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.triton import Description, Direct, launch
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor
    from triton.runtime import KernelInterface


class Tiles(NamedTuple):
    """A tile: queries (times the group) and keys, warps, stages of the pipeline, and the most registers of a thread."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


class Order(NamedTuple):
    """What decides the order of a row's sums over its keys, and the launches that keep it.

    Attributes:
        keys: of a tile. share: keys of a share, a multiple of keys.
        launches: tiles of rows, by ascending rows. Each has a warp for each 16 rows.
    """

    keys: int
    share: int
    launches: tuple[Tiles, ...]


SHARE = 1024
NARROW = Order(64, SHARE, (Tiles(16, 64, 1, 2), Tiles(64, 64, 4, 2)))
"""For widths up to 128: of ten that were tried on an H200, the fastest in chunks, and nearly so in decoding. Bits were
equal in all of them."""
WIDE = Order(32, SHARE, (Tiles(64, 32, 4, 2),))
FEW_PROGRAMS = 8
"""Below so many programs for each multiprocessor every share of a sequence has a program of its own."""
PARTIAL_BYTES = 2**27
"""The most bytes of partial results. A call that would need more adds its shares within one program."""
PROVEN = ("sm90",)
"""The devices on which the products of all tiles were compared bit by bit."""


def order(spec: AttentionSpec) -> Order:
    """Returns the order of a call with ``invariant``: nothing but the widths decides, so no batch or chunk does."""
    return NARROW if max(spec.head_dim, spec.value_dim) <= 128 else WIDE


def sequences(spec: AttentionSpec) -> tuple[int, int, int]:
    """Returns how many sequences a call has, and their most queries and keys."""
    if spec.packed:
        return spec.documents or 0, spec.max_len_q or 1, spec.max_len_k or spec.kv_len
    return spec.batch, spec.q_len, spec.kv_len


def ordered_tiles(spec: AttentionSpec) -> Tiles:
    """Returns the smallest tile that has all queries of a sequence and group, else the largest; bits are the same."""
    rows, launches = sequences(spec)[1] * spec.group_size, order(spec).launches
    return next((tiles for tiles in launches if tiles.rows >= rows), launches[-1])


def blocks(spec: AttentionSpec, tiles: Tiles) -> int:
    """Returns the tiles of rows of the longest sequence."""
    return -(-sequences(spec)[1] * spec.group_size // tiles.rows)


def grid_of(spec: AttentionSpec, one_query: bool, shares: int, row_blocks: int) -> tuple[int, int, int]:
    """Returns the grid of a kernel on pages: sequences times kv heads, shares of the keys, and tiles of rows.

    With offsets, programs at its end clear the tokens behind the last sequence, see ``rows.is_behind``. The first
    axis alone may exceed GRID_LIMIT.

    Args:
        one_query: whether the call has no offsets. shares: 0 if one program has all keys of a tile.
    """
    partial = shares > 0
    more = (0, 0) if one_query else (int(partial), int(not partial))
    return (spec.documents or 0) * spec.num_kv_heads, max(shares, 1) + more[0], row_blocks + more[1]


def ordered_shares(spec: AttentionSpec, multiprocessors: int) -> int:
    """Returns how many programs share the keys of a row; 0 if one adds all shares. Bits are the same."""
    tiles, share, edge = ordered_tiles(spec), order(spec).share, band(spec)
    number, _, keys = sequences(spec)
    count = -(-keys // share)
    if edge.left is not None and edge.right is not None:  # the keys of a tile of rows, which begin anywhere in a share
        reach = edge.left + edge.right + tiles.rows // spec.group_size + 2
        count = min(count, -(-reach // share) + 1)
    programs = number * spec.num_kv_heads * blocks(spec, tiles)
    # Partial results cost memory and a second kernel. Enough programs keep the GPU busy without them.
    size = 4 * count * spec.batch * spec.q_len * spec.num_heads * spec.value_dim
    few = programs < FEW_PROGRAMS * multiprocessors and size <= PARTIAL_BYTES and count <= GRID_LIMIT
    return count if few and count > 1 else 0


class How(NamedTuple):
    """The launches of a call: tiles, partial results of each row (0 if none), keys of a share, and if one has all."""

    tiles: Tiles
    shares: int
    share: int
    one_share: bool


@lru_cache(maxsize=4096)
def how(spec: AttentionSpec, multiprocessors: int) -> How:
    """Returns the launches of a call on a GPU of so many multiprocessors."""
    share = order(spec).share
    one_share = sequences(spec)[2] <= share
    return How(ordered_tiles(spec), ordered_shares(spec, multiprocessors), share, one_share)


def settings_of(spec: AttentionSpec) -> dict[str, int]:
    """Returns the sizes that keep the order of sums, by the names of ``describe_same_bits``."""
    sums = order(spec)
    return {"tile_keys": sums.keys, "share_keys": sums.share}


# The launch that adds the partial results of a call's shares.


def describe_merge(spec: AttentionSpec, operands: tuple[Tensor, ...], shares: int) -> Description:
    """Returns the grid, the numbers and the constants of ``merge_in_order``; see ``launch_merge``."""
    parts, part_lse, _, out, lse = operands
    by_row = (0, lse.stride(0)) if spec.packed else lse.stride()[:2]
    numbers = (shares, spec.q_len, *parts.stride()[:3], *part_lse.stride()[:2], *out.stride()[:2], *by_row)
    constants = {"VALUE_DIM": spec.value_dim, "SINKS": spec.sinks, "num_warps": 1, "enable_fp_fusion": False}
    return (out.shape[0], spec.num_heads, 1), numbers, constants


@cache
def merge_kernel() -> KernelInterface:
    """Returns ``merge_in_order``."""
    from attn_core.backends.shared.in_order.rows import merge_in_order

    return merge_in_order


def launch_merge(spec: AttentionSpec, operands: tuple[Tensor, ...], shares: int) -> Direct | None:
    """Adds partial results into out and lse; see ``shared.triton.launch`` for the result.

    Args:
        operands: parts ``[shares, tokens, heads, dim]`` and their log-sum-exps ``[shares, heads, tokens]``, the sinks,
            out ``[tokens, heads, dim]``, and lse ``[heads, tokens]`` or ``[rows, heads, tokens of a row]``.
    """
    _, _, sinks, out, lse = operands
    key = ("merge_in_order", spec, shares, out.stride(), lse.stride(), sinks.dtype)
    return launch(merge_kernel(), key, operands, lambda: describe_merge(spec, operands, shares))
