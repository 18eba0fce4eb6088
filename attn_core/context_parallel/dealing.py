"""Deals packed documents to ranks: short ones whole, long ones cut, so that ranks have equal work and almost equal
tokens.

A document is cut from both ends to its middle, as a zigzag is. Its i-th token and its i-th last token see together
``length + 1`` keys under a causal mask, so a rank that takes such pairs has the same share of the document's work as
of its tokens. All documents are one line of tokens, the longest document first. Each rank in turn takes from the front
of the line, where tokens have much work, and from the back, where they have little. Two cuts are enough for any share
of work and of tokens, so P ranks make at most 2 (P - 1) cuts; a cut moves to the end of its document if the ranks stay
almost even. Without a causal mask work is proportional, too; with a window it lies between work and tokens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

TOKEN_SLACK = 1 / 32
"""The share by which a rank's tokens may differ from an even share of what is left, to save a cut."""
WORK_SLACK = 1 / 128
"""The same for a rank's work."""

Range = tuple[int, int]
"""Positions ``[start, stop)``."""


def deal(documents: Sequence[int], world: int) -> list[list[Range]]:
    """Returns each rank's positions as ranges, in the order of its shard: pieces of cut documents, then whole ones.

    Args:
        documents: the offsets ``[documents + 1]`` of packed documents.
    """
    line = _Line.of(documents)
    front, back, taken = 0, line.tokens, []
    for ranks in range(world, 0, -1):
        stop, start = (back, back) if ranks == 1 else _choose(line, front, back, ranks)
        taken.append((line.pieces(front, stop), line.pieces(start, back)))
        front, back = stop, start
    return [_in_order(line, [*one, *other]) for one, other in taken]


class _Line(NamedTuple):
    """The tokens of all documents, the longest document first, and each document from both ends to its middle.

    Attributes:
        order: the documents' numbers; empty ones are left out.
        offsets: the row's offsets of documents.
        starts: the place in the line at which each document starts; and the number of all tokens.
        work: the work of all tokens before each start. A token of a document counts as ``length + 1``: twice the keys
            that it sees on average under a causal mask.
    """

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    starts: tuple[int, ...]
    work: tuple[int, ...]

    @classmethod
    def of(cls, documents: Sequence[int]) -> _Line:
        """Returns the line of a row's documents."""
        lengths = [stop - start for start, stop in pairwise(documents)]
        order = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at))
        starts = accumulate((lengths[at] for at in order), initial=0)
        work = accumulate((lengths[at] * (lengths[at] + 1) for at in order), initial=0)
        return cls(tuple(order), tuple(documents), tuple(starts), tuple(work))

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.starts[-1]

    def work_before(self, place: int) -> int:
        """Returns the work of all tokens before a place."""
        at = min(bisect_right(self.starts, place), len(self.starts) - 1) - 1
        return self.work[at] + (place - self.starts[at]) * (self.starts[at + 1] - self.starts[at] + 1)

    def place_of(self, work: float) -> int:
        """Returns the place before which there is so much work, to the nearest place at which a document can be cut."""
        at = min(max(bisect_right(self.work, work), 1), len(self.work) - 1) - 1
        each = self.starts[at + 1] - self.starts[at] + 1
        return self.cut_near(self.starts[at] + (work - self.work[at]) / each)

    def cut_near(self, place: float) -> int:
        """Returns the nearest place at which a document can be cut: behind whole pairs of tokens, or at its end."""
        before, behind = self.ends(place)
        return max(before, min(behind, before + 2 * round((place - before) / 2)))

    def ends(self, place: float) -> Range:
        """Returns the start and the end of the document that a place is in."""
        at = min(max(bisect_right(self.starts, place), 1), len(self.starts) - 1)
        return self.starts[at - 1], self.starts[at]

    def is_cut(self, place: int) -> bool:
        """Returns whether a document goes on at a place."""
        at = bisect_left(self.starts, place)
        return self.starts[at] != place

    def pieces(self, start: int, stop: int) -> list[tuple[int, Range]]:
        """Returns (document, positions) of the tokens from one place to another; two of a document that is cut."""
        pieces = []
        for at in range(bisect_right(self.starts, start) - 1, len(self.order)):
            if self.starts[at] >= stop:
                break
            document = self.order[at]
            first, last = self.offsets[document], self.offsets[document + 1]
            # Tokens a to b of the document's line are its pairs a / 2 to b / 2, or all that is left in its middle.
            a, b = max(start, self.starts[at]) - self.starts[at], min(stop, self.starts[at + 1]) - self.starts[at]
            if b == last - first:
                pieces.append((document, (first + a // 2, last - a // 2)))
            else:
                pieces += [(document, (first + a // 2, first + b // 2)), (document, (last - b // 2, last - a // 2))]
        return [piece for piece in pieces if piece[1][0] < piece[1][1]]


def _choose(line: _Line, front: int, back: int, ranks: int) -> Range:
    """Returns (where the next rank's tokens from the front stop, where those from the back start)."""
    tokens = (back - front) / ranks
    work = (line.work_before(back) - line.work_before(front)) / ranks

    def work_of(stop: int, start: int) -> int:
        return line.work_before(stop) - line.work_before(front) + line.work_before(back) - line.work_before(start)

    # The fewest tokens from the back with which the rank's even share of tokens has no more than its share of work.
    few, many = 0, int(tokens)
    while few < many:
        from_back = (few + many) // 2
        if work_of(front + int(tokens) - from_back, back - from_back) <= work:
            many = from_back
        else:
            few = from_back + 1
    exact = max(line.cut_near(back - few), front)
    best = None
    for start in dict.fromkeys((back, exact, *line.ends(exact))):
        if not front <= start <= back:
            continue
        reached = line.place_of(line.work_before(front) + work - work_of(front, start))
        for stop in dict.fromkeys((reached, *line.ends(reached))):
            stop = max(front, min(stop, start))
            off = (
                abs(stop - front + back - start - tokens) / max(tokens, 1),
                abs(work_of(stop, start) - work) / max(work, 1),
            )
            even = off[0] <= TOKEN_SLACK and off[1] <= WORK_SLACK
            # A place where the two meet is one cut, and one that was there before is none.
            cuts = len({place for place in (stop, start) if line.is_cut(place) and place not in (front, back)})
            effort = (not even, cuts if even else 0, max(off[0] * WORK_SLACK / TOKEN_SLACK, off[1]))
            if best is None or effort < best[0]:
                best = effort, (stop, start)
    assert best is not None  # ``back`` is a candidate
    return best[1]


def _in_order(line: _Line, pieces: list[tuple[int, Range]]) -> list[Range]:
    """Returns pieces of cut documents, document by document, and then whole documents, in the order of positions.

    Cut documents come first, at about the same places on every rank, because ranks send the same places.
    """

    def is_whole(piece: tuple[int, Range]) -> bool:
        document, positions = piece
        return positions == (line.offsets[document], line.offsets[document + 1])

    return [positions for _, positions in sorted(pieces, key=lambda piece: (is_whole(piece), piece[1]))]
