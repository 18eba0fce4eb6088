"""The visible pairs between two runs of positions, as a rectangle of places cut by two diagonal edges.

A position is a token's number in the whole row; a place is its index in a block of queries or keys.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from attn_core.call.arithmetic import banded_pairs
from attn_core.call.masks import Band
from attn_core.context_parallel.layout import Run


class VisibleBand(NamedTuple):
    """The call's mask, in positions: query ``i`` sees key ``j`` if ``-left <= j - (i + offset) <= right``.

    Attributes:
        left, right: 0 or more; None is unbounded.
        documents: the offsets of packed documents, each of which sees only itself; None for no documents.
        parts: the whole mask as bands, instead of all the above; None for a mask that has no key ranges.
        packs: whether parts may share a kernel call, as packed documents: if there is one batch row.
    """

    left: int | None
    right: int | None
    offset: int = 0
    documents: tuple[int, ...] | None = None
    parts: tuple[BandedSegment, ...] | None = None
    packs: bool = True

    @property
    def has_pieces(self) -> bool:
        """Whether several segments may share a kernel call, as packed documents."""
        return self.documents is not None or (self.parts is not None and self.packs)


class Segment(NamedTuple):
    """A rectangle: places ``[q_start, q_stop)`` of a block of queries, and ``[k_start, k_stop)`` of a block of keys."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int

    @property
    def q_len(self) -> int:
        """The number of queries."""
        return self.q_stop - self.q_start

    @property
    def k_len(self) -> int:
        """The number of keys."""
        return self.k_stop - self.k_start

    @property
    def offset(self) -> int:
        """A key's place minus its query's place on the bottom-right diagonal."""
        return self.k_stop - self.q_stop

    def overlaps(self, other: Segment) -> bool:
        """Returns whether both rectangles contain some (query, key) pair."""
        # Ranges are half open, so rectangles that only touch have no pair in common.
        queries = self.q_start < other.q_stop and other.q_start < self.q_stop
        return queries and self.k_start < other.k_stop and other.k_start < self.k_stop

    def bounding_box(self, other: Segment) -> Segment:
        """Returns the smallest rectangle that contains both."""
        return Segment(
            min(self.q_start, other.q_start),
            max(self.q_stop, other.q_stop),
            min(self.k_start, other.k_start),
            max(self.k_stop, other.k_stop),
        )


class BandedSegment(NamedTuple):
    """A rectangle and a band in places: a pair is visible if ``low <= key's place - query's place <= high``.

    An edge is None if it does not cut the rectangle.
    """

    segment: Segment
    low: int | None
    high: int | None

    @property
    def pairs(self) -> int:
        """The number of visible pairs."""
        (q_start, q_stop, k_start, k_stop), low, high = self
        if low is None and high is None:
            return (q_stop - q_start) * (k_stop - k_start)
        apart = k_start - q_start
        edge = Band(None if low is None else apart - low, None if high is None else high - apart, 0)
        return max(0, banded_pairs(edge, q_stop - q_start, k_stop - k_start))

    def intersect(self, low: int | None, high: int | None) -> BandedSegment:
        """Returns the intersection with another band."""
        lows, highs = [x for x in (self.low, low) if x is not None], [x for x in (self.high, high) if x is not None]
        return BandedSegment(self.segment, max(lows, default=None), min(highs, default=None))

    def drop_idle_edges(self) -> BandedSegment:
        """Returns the same pairs with edges set to None that do not cut the rectangle."""
        (q_start, q_stop, k_start, k_stop), low, high = self
        # The first query and the last key are furthest apart to the right, the last and the first to the left.
        if high is not None and high >= k_stop - 1 - q_start:
            high = None
        if low is not None and low <= k_start - (q_stop - 1):
            low = None
        return BandedSegment(self.segment, low, high)


def visible_segment(query: Run, q_place: int, key: Run, k_place: int, visible: VisibleBand) -> BandedSegment | None:
    """Returns the visible pairs between two runs that begin at two places, without rows and columns that see nothing.

    Both runs must have one stride, unless one of them is a single position. None if no pair is visible.
    """
    # The stride of a single position means nothing, so the other run's counts.
    stride = key.stride if query.count == 1 else query.stride
    if query.count > 1 and key.count > 1 and query.stride != key.stride:
        raise AssertionError(f"runs of different strides: {query}, {key}")
    shift = query.start + visible.offset - key.start  # j - i (places) = distance / stride + shift / stride
    # Round inwards (high down, low up): between two multiples of the stride lies no position of these runs.
    high = None if visible.right is None else (shift + visible.right) // stride
    low = None if visible.left is None else -((visible.left - shift) // stride)
    if low is not None and high is not None and low > high:  # no multiple of the stride lies inside the band
        return None
    # Query place i sees the key places from i + low to i + high, which must lie in [0, key.count).
    q_first, k_first = max(0, 0 if high is None else -high), max(0, 0 if low is None else low)
    q_stop = query.count if low is None else min(query.count, key.count - low)
    k_stop = key.count if high is None else min(key.count, query.count + high)
    if q_first >= q_stop or k_first >= k_stop:
        return None
    segment = Segment(q_place + q_first, q_place + q_stop, k_place + k_first, k_place + k_stop)
    apart = k_place - q_place
    low, high = None if low is None else low + apart, None if high is None else high + apart
    return BandedSegment(segment, low, high).drop_idle_edges()


def join(a: BandedSegment, b: BandedSegment) -> BandedSegment | None:
    """Returns one rectangle with one band that has exactly the pairs of both; None if there is no such rectangle."""
    # Pairs in both would be counted twice, and the comparison of counts below would prove nothing.
    if a.segment.overlaps(b.segment):
        return None
    whole, pairs = a.segment.bounding_box(b.segment), a.pairs + b.pairs
    # If both are pieces of one band, each edge of that band cuts one of them, or is None because it cuts neither.
    for low, high in product({a.low, b.low, None}, {a.high, b.high, None}):
        both = BandedSegment(whole, low, high)
        # The band keeps all pairs of a and of b. If the counts are equal as well, it adds no other pair.
        if both.pairs == pairs and all(_keeps_pairs(part, low, high) for part in (a, b)):
            return both.drop_idle_edges()
    return None


def _keeps_pairs(part: BandedSegment, low: int | None, high: int | None) -> bool:
    """Returns whether a band has exactly the pairs of ``part`` inside the rectangle of ``part``."""
    return part.intersect(low, high).pairs == part.pairs == BandedSegment(part.segment, low, high).pairs
