"""Key ranges as few bands: rectangles of (query, key) pairs, cut by diagonal edges, that kernels can run as tiles.

A shared prefix is one rectangle that a diagonal cuts, and a causal square for each completion. An image in text is a
part of one causal triangle for the whole row, and the triangle above the diagonal inside the image. ``tiles`` packs
bands of one kind into one call of a kernel, and the results are merged by their log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np

from attn_core.call.key_ranges import check_shape, check_values, within_band
from attn_core.call.kinds import check_int32
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Array
from attn_core.context_parallel.bands import BandedSegment, Segment, VisibleBand, join
from attn_core.context_parallel.layout import Run
from attn_core.context_parallel.tiles import Tile, max_overlap, split_into_tiles
from attn_core.errors import SpecError

Bands = tuple[BandedSegment, ...]

MOST_BANDS = 1024
"""More bands are not worth a plan: they are slices of a mask that has no form, and Python handles each of them."""
MOST_TILES = 16
"""The most kernel calls of a decomposition. Each reads its queries again, and its result is merged."""
NEIGHBOURS = 4
"""How many of the latest bands a further one may continue. A key's ranges lie in a few bands at once."""


@lru_cache(maxsize=64)
def bands_of(
    content: bytes, ranges: int, q_len: int, edges: tuple[int | None, int | None], windows: bool = True
) -> Bands | None:
    """Returns the visible pairs of one batch row as bands; cached. None if they need too many kernel calls.

    Args:
        content: the bytes of int32 ``[kv_len, ranges, 2]``, valid key ranges.
        ranges: how many each key has.
        q_len: of the row.
        edges: the band of causal and window: ``low <= key - query <= high``; None is unbounded.
        windows: whether tiles may have windows; else each is whole or causal, which more kernels run.

    Returns:
        The bands of the decomposition that needs the fewest kernel calls, and the fewest with windows. Every visible
        pair is in exactly one.
    """
    key_ranges = np.frombuffer(content, np.int32).reshape(-1, ranges, 2).astype(np.int64)
    sides = [within_band(*side, edges, q_len) for side in _disjoint(key_ranges)]
    runs: list[BandedSegment] = []
    for start, stop in sides:
        found = _runs(start, stop)
        if found is None or len(runs) + len(found) > MOST_BANDS:
            return None
        runs += found
    # By key, because only neighbours can be joined.
    runs.sort(key=lambda band: (band.segment.k_start, band.segment.q_start))
    best: tuple[tuple[int, int, int], Bands] | None = None
    for at_corner, under_squares in product((False, True), (False, True)):
        below, above = _split_at_corners(runs) if at_corner else (runs, [])
        joined = _join_neighbours(below)
        bands = (*(_cut_under_squares(joined) if under_squares else joined), *above)
        # Bands that have a query or a key in common need calls of their own.
        both = ([band.segment[at : at + 2] for band in bands] for at in (0, 2))
        if any(max_overlap(side) > MOST_TILES for side in both):
            continue
        tiles = tiles_on_one_device(bands, q_len, len(key_ranges))
        if len(tiles) > MOST_TILES or not (windows or all(map(_is_plain, tiles))):
            continue
        # Kernels are fastest without a window, and merges read their rows.
        effort = len(tiles), sum(not _is_plain(tile) for tile in tiles), sum(tile.q_len for tile in tiles)
        if best is None or effort < best[0]:
            best = effort, bands
    return None if best is None else best[1]


def tiles_on_one_device(bands: Bands, q_len: int, kv_len: int) -> tuple[Tile, ...]:
    """Returns the kernel calls that compute a row's bands, if one device holds the row."""
    return split_into_tiles((Run(0, q_len),), (Run(0, kv_len),), VisibleBand(None, None, parts=bands))


def _is_plain(tile: Tile) -> bool:
    return tile.left is None and tile.right in (None, 0)


def bands_of_row(key_ranges: Array, spec: AttentionSpec) -> Bands:
    """Returns the bands of a row that is spread over ranks.

    Args:
        key_ranges: as the caller passed them.
        spec: the whole call, without the ranges.

    Raises:
        ShapeError, DTypeError, SpecError: for ranges that are not in numpy, invalid, or not a few bands; and beside
            packed documents.
    """
    if not isinstance(key_ranges, np.ndarray):
        raise SpecError(
            "key_ranges: expected a numpy array in context parallelism, because the ranges decide what is sent where; "
            f"got {type(key_ranges)}"
        )
    check_int32("key_ranges", key_ranges.dtype)
    if spec.packed:
        raise SpecError(
            "key_ranges: expected None beside seq_info in context parallelism; attn_core.masks.documents has documents "
            "as ranges"
        )
    # Ranks would have to cut rows and heads apart.
    check_shape(tuple(key_ranges.shape), 1, 1, spec.kv_len)
    check_values(key_ranges, spec.q_len)
    bands = bands_of(key_ranges[0, 0].tobytes(), key_ranges.shape[3], spec.q_len, edges_of(spec))
    if bands is None:
        raise SpecError(
            f"key_ranges: expected few bands in context parallelism; these would take more than {MOST_TILES} kernel "
            "calls on one device"
        )
    return bands


def edges_of(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Returns the band of causal and window, ``low <= key - query <= high``; None is unbounded."""
    edge = band(spec)
    low = None if edge.left is None else edge.offset - edge.left
    return low, None if edge.right is None else edge.offset + edge.right


def of_rows(bands: Sequence[Bands], q_len: int, kv_len: int) -> Bands:
    """Returns the bands of several batch rows in one row that holds them end to end."""
    return tuple(
        BandedSegment(_moved(each.segment, row * q_len, row * kv_len), *_shifted(each, row * (kv_len - q_len)))
        for row, of_row in enumerate(bands)
        for each in of_row
    )


def _moved(segment: Segment, queries: int, keys: int) -> Segment:
    q_start, q_stop, k_start, k_stop = segment
    return Segment(q_start + queries, q_stop + queries, k_start + keys, k_stop + keys)


def _shifted(band: BandedSegment, by: int) -> tuple[int | None, int | None]:
    return tuple(None if edge is None else edge + by for edge in (band.low, band.high))  # type: ignore[return-value]


Side = tuple[np.ndarray, np.ndarray]
"""For each key one range of queries: the first, and the one behind the last; start >= stop if it is empty."""


def _disjoint(key_ranges: np.ndarray) -> list[Side]:
    """Returns the ranges of each key in ascending order; two that overlap or touch become one."""
    starts, stops = key_ranges[..., 0], key_ranges[..., 1]
    if key_ranges.shape[1] == 1:
        return [(starts[:, 0], stops[:, 0])]
    empty = starts >= stops
    # Empty ranges go last.
    last = np.iinfo(np.int64).max
    order = np.argsort(np.where(empty, last, starts), axis=1, kind="stable")
    starts, stops, empty = (np.take_along_axis(each, order, 1) for each in (starts, stops, empty))
    (first, second), (first_stop, second_stop) = starts.T, stops.T
    touch = ~empty[:, 1] & (second <= first_stop)
    first_stop = np.where(touch, np.maximum(first_stop, second_stop), first_stop)
    return [(first, first_stop), (np.where(touch, 0, second), np.where(touch, 0, second_stop))]


def _runs(start: np.ndarray, stop: np.ndarray) -> list[BandedSegment] | None:
    """Returns the ranges as bands: neighbouring keys whose ends stay, or move by one query with each key.

    None if there are more than MOST_BANDS.
    """
    seen = start < stop
    steps = np.diff(start), np.diff(stop)
    regular = seen[:-1] & seen[1:] & np.isin(steps[0], (0, 1)) & np.isin(steps[1], (0, 1))
    # How each key continues the one before it; -1 if it does not.
    kind = np.where(regular, 2 * steps[0] + steps[1], -1)
    cuts = np.flatnonzero(np.diff(kind)) + 1
    if len(cuts) > 4 * MOST_BANDS:
        return None
    groups = [(int(a), int(b)) for a, b in zip([0, *cuts], [*cuts, len(kind)], strict=True) if a < b and kind[a] >= 0]
    bands: list[BandedSegment] = []
    free = 0  # keys before ``free`` are in a band, or hidden

    def alone(first: int, last: int) -> Iterator[BandedSegment]:
        for key in np.flatnonzero(seen[first:last]) + first:
            yield BandedSegment(Segment(int(start[key]), int(stop[key]), int(key), int(key) + 1), None, None)

    for at, (a, b) in enumerate(groups):  # keys a to b, inclusive; two groups may share a key
        last = b + 1
        follower = groups[at + 1] if at + 1 < len(groups) else None
        # A key in which a diagonal and a straight edge meet belongs to the straight one: an image, not the text before.
        if follower is not None and follower[0] == b and kind[a] >= 2 and kind[follower[0]] < 2:
            last = b
        first = max(a, free)
        if len(bands) + np.count_nonzero(seen[free:first]) > MOST_BANDS:
            return None
        bands += alone(free, first)
        if last - first >= 1:
            bands.append(_band(start, stop, first, last, int(kind[a])))
        free = max(free, last)
    if np.count_nonzero(seen[free:]) + len(bands) > MOST_BANDS:
        return None
    return [*bands, *alone(free, len(seen))]


def _band(start: np.ndarray, stop: np.ndarray, first: int, last: int, kind: int) -> BandedSegment:
    """Returns the band of keys [first, last) whose starts (kind >= 2) or stops (odd kind) move with the key."""
    segment = Segment(int(start[first]), int(stop[last - 1]), first, last)
    high = first - segment.q_start if kind >= 2 else None
    low = last - segment.q_stop if kind % 2 else None
    return BandedSegment(segment, low, high).drop_idle_edges()


def _split_at_corners(bands: Sequence[BandedSegment]) -> tuple[list[BandedSegment], list[BandedSegment]]:
    """Splits rectangles at the diagonal through their first pair; returns (on it and below, above it)."""
    below, above = [], []
    for each in bands:
        (q_start, q_stop, k_start, k_stop), low, high = each
        queries, keys = q_stop - q_start, k_stop - k_start
        if high is not None or low is not None or keys < 2 or queries < keys:
            below.append(each)
            continue
        diagonal = k_start - q_start
        below.append(BandedSegment(each.segment, None, diagonal))
        upper = Segment(q_start, q_start + keys - 1, k_start + 1, k_stop)
        above.append(BandedSegment(upper, diagonal + 1, None).drop_idle_edges())
    return below, above


def _join_neighbours(bands: Sequence[BandedSegment]) -> list[BandedSegment]:
    """Joins bands that continue one of the latest; ``bands`` are in the order of keys."""
    joined: list[BandedSegment] = []
    for each in bands:
        for at in range(len(joined) - 1, max(-1, len(joined) - 1 - NEIGHBOURS), -1):
            both = join(joined[at], each)
            if both is not None:
                joined[at] = both
                break
        else:
            joined.append(each)
    return joined


def _cut_under_squares(bands: Sequence[BandedSegment]) -> Iterator[BandedSegment]:
    """Cuts bands under a diagonal that starts in their corner into a square and the rectangle below it.

    Squares of all sizes share one call of a kernel, whose diagonal is in each square's corner.
    """
    for each in bands:
        (q_start, q_stop, k_start, k_stop), low, high = each
        below = q_start + k_stop - k_start
        if low is not None or high != k_start - q_start or below >= q_stop:
            yield each
            continue
        yield BandedSegment(Segment(q_start, below, k_start, k_stop), None, high).drop_idle_edges()
        yield BandedSegment(Segment(below, q_stop, k_start, k_stop), None, None)
