"""Splits the visible pairs between a block of queries and a block of keys into tiles that kernels can run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from attn_core.context_parallel.bands import Part, Segment, Visible, between, one
from attn_core.context_parallel.layout import Run


class Tile(NamedTuple):
    """One call of a kernel: segments that share a window, in which every query sees a key.

    Attributes:
        segments: one; or for packed documents several, which share no query and no key.
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
    def q_len(self) -> int:
        """The number of queries of all segments."""
        return sum(segment.q_len for segment in self.segments)

    @property
    def k_len(self) -> int:
        """The number of keys of all segments."""
        return sum(segment.k_len for segment in self.segments)

    @property
    def offsets(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offsets of the segments' queries, offsets of their keys), each with the end."""
        lengths = ((segment.q_len, segment.k_len) for segment in self.segments)
        q, k = (tuple(accumulate(side, initial=0)) for side in zip(*lengths, strict=True))
        return q, k

    @property
    def pairs(self) -> int:
        """The number of (query, key) pairs."""
        return sum(self._part(segment).pairs for segment in self.segments)

    def _part(self, segment: Segment) -> Part:
        low = None if self.left is None else segment.offset - self.left
        return Part(segment, low, None if self.right is None else segment.offset + self.right)


def deepest(ranges: Iterable[tuple[int, int]]) -> int:
    """The most ranges ``[start, stop)`` that one place is in."""
    ends = sorted((place, step) for start, stop in ranges for place, step in ((start, 1), (stop, -1)) if start < stop)
    return max(accumulate(step for _, step in ends), default=0)


class Piece(NamedTuple):
    """A run of one document, at ``place`` of a block."""

    document: int
    place: int
    run: Run


def tiles(queries: Sequence[Run], keys: Sequence[Run], visible: Visible) -> tuple[Tile, ...]:
    """The tiles that compute every visible pair of two blocks once; each has a visible pair.

    Rows and columns without a visible pair are cropped. A band is then a window with distances of 0 or more around the
    bottom-right diagonal. Neighbours that form one band are one tile.
    """
    parts = [
        part
        for q_pieces, k_pieces in _by_document(_split(queries, visible.documents), _split(keys, visible.documents))
        for part in _joined(part for piece in q_pieces for part in _row(piece, k_pieces, visible))
    ]
    return _grouped(parts, visible)


def _split(runs: Sequence[Run], documents: tuple[int, ...] | None) -> list[Piece]:
    """Cuts the runs where documents end; each piece has its place."""
    cut, place, document = [], 0, 0
    for run in runs:
        while run.count:
            taken = run.count
            if documents is not None:
                while documents[document + 1] <= run.start:
                    document += 1
                while documents[document] > run.start:
                    document -= 1
                taken = min(taken, -(-(documents[document + 1] - run.start) // run.stride))
            cut.append(Piece(document, place, Run(run.start, taken, run.stride)))
            place += taken
            run = Run(run.start + taken * run.stride, run.count - taken, run.stride)
    return cut


def _by_document(queries: list[Piece], keys: list[Piece]) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """The pieces of each document that both blocks hold."""
    of_keys: dict[int, list[Piece]] = {}
    for piece in keys:
        of_keys.setdefault(piece.document, []).append(piece)
    for document, pieces in groupby(sorted(queries), key=lambda piece: piece.document):
        if document in of_keys:
            yield list(pieces), of_keys[document]


def _row(query: Piece, keys: list[Piece], visible: Visible) -> list[Part]:
    """The visible parts between a piece of queries and each piece of keys, with neighbours joined."""
    parts = (between(query.run, query.place, key.run, key.place, visible) for key in keys)
    return _joined(part for part in parts if part is not None)


def _joined(parts: Iterable[Part]) -> list[Part]:
    """The parts; parts that form one band are joined."""
    joined: list[Part] = []
    for part in parts:
        for at, other in enumerate(joined):
            both = one(other, part)
            if both is not None:
                joined[at] = both
                break
        else:
            joined.append(part)
    return joined


def _grouped(parts: list[Part], visible: Visible) -> tuple[Tile, ...]:
    """Parts as tiles. Parts of packed documents share a tile if they have one window and no place in common."""
    groups: list[tuple[list[Segment], int | None, int | None]] = []
    for segment, low, high in sorted(parts, key=lambda part: part.segment):
        left = None if low is None else segment.offset - low
        right = None if high is None else high - segment.offset
        for segments, *window in groups if visible.documents is not None else ():
            if _same(segment, window, (left, right)) and _follows(segment, segments[-1]):
                segments.append(segment)
                break
        else:
            groups.append(([segment], *_general(segment, left, right, visible)))
    return tuple(Tile(tuple(segments), left, right) for segments, left, right in groups)


def _general(segment: Segment, left: int | None, right: int | None, visible: Visible) -> tuple[int | None, int | None]:
    """The call's own window if it hides the same pairs here, so that more segments can share a tile."""
    own = (visible.left, visible.right)
    if visible.documents is not None and _same(segment, own, (left, right)):
        return own
    return left, right


def _same(segment: Segment, window: Sequence[int | None], other: Sequence[int | None]) -> bool:
    """Whether two windows hide the same pairs of a segment."""
    for mine, its, reach in ((window[0], other[0], segment.k_len - 1), (window[1], other[1], segment.q_len - 1)):
        if min(reach if mine is None else mine, reach) != min(reach if its is None else its, reach):
            return False
    return True


def _follows(segment: Segment, last: Segment) -> bool:
    """Whether a segment's queries and keys both come after another's."""
    return segment.q_start >= last.q_stop and segment.k_start >= last.k_stop
