"""Bands: the visible pairs between two runs of positions, as a rectangle of places with two straight edges."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from attn_core.call.arithmetic import banded_pairs
from attn_core.call.masks import Band
from attn_core.context_parallel.layout import Run


class Visible(NamedTuple):
    """The band in positions: key ``j`` is visible to query ``i`` iff ``-left <= j - (i + offset) <= right``.

    Attributes:
        left, right: 0 or more; None is unbounded.
        documents: offsets of packed documents, each of which sees only itself; None for no documents.
    """

    left: int | None
    right: int | None
    offset: int = 0
    documents: tuple[int, ...] | None = None


class Segment(NamedTuple):
    """Places ``[q_start, q_stop)`` of a block of queries, and ``[k_start, k_stop)`` of a block of keys."""

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

    def meets(self, other: Segment) -> bool:
        """Whether a pair of places is in both."""
        queries = self.q_start < other.q_stop and other.q_start < self.q_stop
        return queries and self.k_start < other.k_stop and other.k_start < self.k_stop

    def around(self, other: Segment) -> Segment:
        """The smallest rectangle that contains both."""
        (q_start, k_start), (q_stop, k_stop) = map(min, self[::2], other[::2]), map(max, self[1::2], other[1::2])
        return Segment(q_start, q_stop, k_start, k_stop)


class Part(NamedTuple):
    """A rectangle of places and its band in places: visible iff ``low <= key's place - query's place <= high``.

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

    def within(self, low: int | None, high: int | None) -> Part:
        """The intersection with a band."""
        lows, highs = [x for x in (self.low, low) if x is not None], [x for x in (self.high, high) if x is not None]
        return Part(self.segment, max(lows, default=None), min(highs, default=None))

    def uncut(self) -> Part:
        """The part with edges that do not cut it set to None."""
        (q_start, q_stop, k_start, k_stop), low, high = self
        if high is not None and high >= k_stop - 1 - q_start:
            high = None
        if low is not None and low <= k_start - (q_stop - 1):
            low = None
        return Part(self.segment, low, high)


def between(query: Run, q_place: int, key: Run, k_place: int, visible: Visible) -> Part | None:
    """The visible part between two runs of one stride at two places, cropped; None if no pair is visible."""
    stride = key.stride if query.count == 1 else query.stride
    if query.count > 1 and key.count > 1 and query.stride != key.stride:
        raise AssertionError(f"runs of different strides: {query}, {key}")
    shift = query.start + visible.offset - key.start  # j - i (places) = distance / stride + shift / stride
    high = None if visible.right is None else (shift + visible.right) // stride
    low = None if visible.left is None else -((visible.left - shift) // stride)
    if low is not None and high is not None and low > high:  # stripes that pass each other
        return None
    q_first, k_first = max(0, 0 if high is None else -high), max(0, 0 if low is None else low)
    q_stop = query.count if low is None else min(query.count, key.count - low)
    k_stop = key.count if high is None else min(key.count, query.count + high)
    if q_first >= q_stop or k_first >= k_stop:
        return None
    segment = Segment(q_place + q_first, q_place + q_stop, k_place + k_first, k_place + k_stop)
    apart = k_place - q_place
    return Part(segment, None if low is None else low + apart, None if high is None else high + apart).uncut()


def one(a: Part, b: Part) -> Part | None:
    """Two parts as one rectangle with one band that has exactly their pairs; None if there is no such rectangle."""
    if a.segment.meets(b.segment):
        return None
    whole, pairs = a.segment.around(b.segment), a.pairs + b.pairs
    for low, high in product({a.low, b.low, None}, {a.high, b.high, None}):
        both = Part(whole, low, high)
        # The rectangle contains both parts' pairs. If the counts are equal, it contains no other pairs.
        if both.pairs == pairs and all(_means(part, low, high) for part in (a, b)):
            return both.uncut()
    return None


def _means(part: Part, low: int | None, high: int | None) -> bool:
    """Whether a band has exactly the pairs of a part in the part's rectangle."""
    return part.within(low, high).pairs == part.pairs == Part(part.segment, low, high).pairs
