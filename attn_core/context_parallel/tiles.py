"""Splits the visible pairs between a block of queries and a block of keys into tiles that kernels can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from attn_core.context_parallel.bands import BandedSegment, Segment, VisibleBand, join, visible_segment
from attn_core.context_parallel.layout import Run


class Tile(NamedTuple):
    """One kernel call: segments that share a window, in which every query sees a key.

    Attributes:
        segments: one; or, of documents and key ranges, several that have no query and no key in common.
        left, right: the window's inclusive distances around each segment's bottom-right diagonal; None is unbounded.
    """

    segments: tuple[Segment, ...]
    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """Whether keys after the diagonal are hidden."""
        return self.right == 0

    @property
    def packed(self) -> bool:
        """Whether it is a call on packed documents: it has several segments."""
        return len(self.segments) > 1

    @property
    def q_len(self) -> int:
        """The number of queries of all segments."""
        return sum(segment.q_len for segment in self.segments)

    @property
    def k_len(self) -> int:
        """The number of keys of all segments."""
        return sum(segment.k_len for segment in self.segments)

    @property
    def offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The segments as packed documents: (offsets of the queries, offsets of the keys)."""
        lengths = ((segment.q_len, segment.k_len) for segment in self.segments)
        q, k = (tuple(accumulate(side, initial=0)) for side in zip(*lengths, strict=True))
        return q, k

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs."""
        return sum(self._banded(segment).pairs for segment in self.segments)

    def keys_of(self, segment: Segment, first: int, stop: int) -> tuple[int, int]:
        """Returns the keys from the first to the last that queries [first, stop) of a segment see, half open."""
        rows = max(first, segment.q_start), min(stop, segment.q_stop) - 1
        low = segment.k_start if self.left is None else rows[0] + segment.offset - self.left
        high = segment.k_stop if self.right is None else rows[1] + segment.offset + self.right + 1
        return max(low, segment.k_start), min(high, segment.k_stop)

    def _banded(self, segment: Segment) -> BandedSegment:
        # A tile's window counts from the bottom-right diagonal, a BandedSegment's band from equal places.
        low = None if self.left is None else segment.offset - self.left
        return BandedSegment(segment, low, None if self.right is None else segment.offset + self.right)


THIN = 4
"""How many segments of a group are compared with another window."""


def max_overlap(ranges: Iterable[tuple[int, int]]) -> int:
    """Returns the largest number of ranges ``[start, stop)`` that have one place in common."""
    # At one place, ends (-1) sort before starts (+1), so ranges that only touch do not overlap.
    ends = sorted((place, step) for start, stop in ranges for place, step in ((start, 1), (stop, -1)) if start < stop)
    return max(accumulate(step for _, step in ends), default=0)


class Piece(NamedTuple):
    """A run of positions of one document, which begins at ``place`` of a block."""

    document: int
    place: int
    run: Run


def split_into_tiles(queries: Sequence[Run], keys: Sequence[Run], visible: VisibleBand) -> tuple[Tile, ...]:
    """Returns tiles that compute every visible pair of two blocks exactly once. Each tile has a visible pair.

    Rows and columns without a visible pair are left out. What remains of a band is a window around the bottom-right
    diagonal with distances of 0 or more, which every kernel supports. Segments that form one band become one tile.
    """
    if visible.parts is not None:
        return _group_into_tiles(list(_parts_of_bands(queries, keys, visible.parts)), visible)
    parts = [
        part
        for q_pieces, k_pieces in _pair_by_document(
            _cut_at_documents(queries, visible.documents), _cut_at_documents(keys, visible.documents)
        )
        for part in _join_all(part for piece in q_pieces for part in _parts_of_piece(piece, k_pieces, visible))
    ]
    return _group_into_tiles(parts, visible)


def _parts_of_bands(
    queries: Sequence[Run], keys: Sequence[Run], bands: Iterable[BandedSegment]
) -> Iterator[BandedSegment]:
    """Yields the visible parts of each band between two blocks, joined where possible."""
    q_pieces, k_pieces = _cut_at_documents(queries, None), _cut_at_documents(keys, None)
    for (q_start, q_stop, k_start, k_stop), low, high in bands:
        of_band = VisibleBand(None if low is None else -low, high)
        of_keys = [piece for piece in (_clip(each, k_start, k_stop) for each in k_pieces) if piece.run.count]
        parts: list[BandedSegment] = []
        for piece in q_pieces:
            query = _clip(piece, q_start, q_stop)
            if query.run.count:
                parts += _parts_of_piece(query, of_keys, of_band)
        yield from parts if len(parts) < 2 else _join_all(parts)


def _clip(piece: Piece, start: int, stop: int) -> Piece:
    """Returns the positions of a piece in ``[start, stop)``."""
    run = piece.run
    skipped = max(0, -(-(start - run.start) // run.stride))
    count = max(0, min(run.count, -(-(stop - run.start) // run.stride)) - skipped)
    return Piece(piece.document, piece.place + skipped, Run(run.start + skipped * run.stride, count, run.stride))


def _cut_at_documents(runs: Sequence[Run], documents: tuple[int, ...] | None) -> list[Piece]:
    """Cuts the runs where documents end."""
    cut, place, document = [], 0, 0
    for run in runs:
        while run.count:
            count = run.count
            if documents is not None:
                while documents[document + 1] <= run.start:
                    document += 1
                while documents[document] > run.start:
                    document -= 1
                # A stride may step over the end of a document, so round the count up.
                count = min(count, -(-(documents[document + 1] - run.start) // run.stride))
            cut.append(Piece(document, place, Run(run.start, count, run.stride)))
            place += count
            run = Run(run.start + count * run.stride, run.count - count, run.stride)
    return cut


def _pair_by_document(queries: list[Piece], keys: list[Piece]) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """Yields the pieces of each document that both blocks hold."""
    of_keys: dict[int, list[Piece]] = {}
    for piece in keys:
        of_keys.setdefault(piece.document, []).append(piece)
    # groupby needs one document's pieces next to each other, and a block of stripes holds them apart.
    for document, pieces in groupby(sorted(queries), key=lambda piece: piece.document):
        if document in of_keys:
            yield list(pieces), of_keys[document]


def _parts_of_piece(query: Piece, keys: list[Piece], visible: VisibleBand) -> list[BandedSegment]:
    """Returns the visible parts between one piece of queries and each piece of keys, joined where possible."""
    parts = (visible_segment(query.run, query.place, key.run, key.place, visible) for key in keys)
    return _join_all(part for part in parts if part is not None)


def _join_all(parts: Iterable[BandedSegment]) -> list[BandedSegment]:
    """Joins parts that form one band."""
    joined: list[BandedSegment] = []
    for part in parts:
        for at, other in enumerate(joined):
            both = join(other, part)
            if both is not None:
                joined[at] = both
                break
        else:
            joined.append(part)
    return joined


def _group_into_tiles(parts: list[BandedSegment], visible: VisibleBand) -> tuple[Tile, ...]:
    """Turns parts into tiles.

    Parts of documents and of key ranges share a tile if they have one window and no common place.
    """
    groups: list[tuple[list[Segment], int | None, int | None]] = []
    # Sorted by queries, so that ``_comes_after`` need only compare with the last segment of a group.
    for segment, low, high in sorted(parts, key=lambda part: part.segment):
        left = None if low is None else segment.offset - low
        right = None if high is None else high - segment.offset
        window = _common_window(segment, left, right, visible)
        for at, (segments, *of_group) in enumerate(groups if visible.has_pieces else ()):
            if not _comes_after(segment, segments[-1]):
                continue
            if _windows_agree(segment, of_group, window):
                segments.append(segment)
                break
            # A group of a few thin segments may take the window of the next one, which hides nothing of them.
            if len(segments) <= THIN and all(_windows_agree(each, of_group, window) for each in segments):
                groups[at] = ([*segments, segment], *window)
                break
        else:
            groups.append(([segment], *window))
    return tuple(Tile(tuple(segments), left, right) for segments, left, right in groups)


def _common_window(
    segment: Segment, left: int | None, right: int | None, visible: VisibleBand
) -> tuple[int | None, int | None]:
    """Returns the call's own window if it hides the same pairs in this segment, so that more segments share a tile."""
    of_call = (visible.left, visible.right)
    if visible.documents is not None and _windows_agree(segment, of_call, (left, right)):
        return of_call
    return left, right


def _windows_agree(segment: Segment, window: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Returns whether two windows hide the same pairs of a segment."""
    for one, two, reach in ((window[0], other[0], segment.k_len - 1), (window[1], other[1], segment.q_len - 1)):
        # Distances beyond the segment hide nothing there, however large they are.
        if min(reach if one is None else one, reach) != min(reach if two is None else two, reach):
            return False
    return True


def _comes_after(segment: Segment, last: Segment) -> bool:
    """Returns whether the segment's queries and keys both lie after those of ``last``."""
    return segment.q_start >= last.q_stop and segment.k_start >= last.k_stop
