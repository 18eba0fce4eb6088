"""Deals packed documents to ranks: short ones whole, long ones cut, so that ranks have equal work and almost equal
tokens.

A document is cut from both ends to its middle, as a zigzag is. Its i-th token and its i-th last token see together
``length + 1`` keys under a causal mask, so a rank that takes such pairs has the same share of the document's work as
of its tokens. All documents are one line of tokens, the longest document first. Each rank in turn takes its share of
work from the front of the line, where tokens have much work, and whole documents from the back, where they have
little, until it has its share of tokens, too. If no whole documents fit, one is cut at the back. Two cuts are enough
for any share of work and of tokens, so P ranks make at most 2 (P - 1) cuts. Without a causal mask work is proportional,
too. A window takes more work from long documents than from short ones, so ranks are less even.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, compress, pairwise, product
from typing import NamedTuple

TOKEN_SLACK = 1 / 64
"""The share by which a rank's tokens may differ from an even share of what is left, to save a cut. Other layers than
attention compute as many tokens as the rank with the most has."""
WORK_SLACK = 1 / 128
"""The same for a rank's work."""
OPTIONS = 6
"""How many documents, those around the place at which a cut would be exact, are tried in every combination."""

Range = tuple[int, int]
"""Positions ``[start, stop)``."""


class _Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document of ``length``, counted from both of its ends to its middle.

    A token counts ``length + 1`` as work: twice the keys that it sees on average under a causal mask.
    """

    document: int
    start: int
    stop: int
    length: int

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return self.stop - self.start

    @property
    def work(self) -> int:
        """The work of the tokens."""
        return self.tokens * (self.length + 1)

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole document."""
        return self.tokens == self.length

    def positions(self, first: int) -> tuple[Range, ...]:
        """Returns the positions of the tokens of a document that begins at ``first``: two ranges if more is behind."""
        # Tokens 2 i and 2 i + 1 are the document's i-th and i-th last.
        head, tail = self.start // 2, self.length - self.start // 2
        if self.stop == self.length:
            return ((first + head, first + tail),)
        return (first + head, first + self.stop // 2), (first + self.length - self.stop // 2, first + tail)


@lru_cache(maxsize=64)
def deal(documents: tuple[int, ...], world: int) -> tuple[tuple[Range, ...], ...]:
    """Returns each rank's positions as ranges, in the order of its shard; cached.

    Pieces of cut documents come first, at about the same places on every rank, because ranks send the same places: in
    front those that ranks before it have, too. Then come whole documents, in the order of positions.

    Args:
        documents: the offsets ``[documents + 1]`` of packed documents.
    """
    lengths = [stop - start for start, stop in pairwise(documents)]
    order = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at))
    line = [_Piece(at, 0, lengths[at], lengths[at]) for at in order]
    ranks = []
    for left in range(world, 1, -1):
        taken, line = _split(line, left)
        ranks.append(taken)
    ranks.append(line)
    first: dict[int, int] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            first.setdefault(piece.document, rank)

    def in_shard(piece: _Piece) -> tuple[bool, int, _Piece]:
        return piece.is_whole, 0 if piece.is_whole else first[piece.document], piece

    return tuple(
        tuple(part for piece in sorted(pieces, key=in_shard) for part in piece.positions(documents[piece.document]))
        for pieces in ranks
    )


class _Share(NamedTuple):
    """What a rank may take: the first ``front`` tokens of the pieces that are not ``mine``, and ``mine``.

    ``effort`` is the lower the better.
    """

    effort: tuple[bool, int, float]
    front: float
    mine: tuple[int, ...]


def _split(line: list[_Piece], ranks: int) -> tuple[list[_Piece], list[_Piece]]:
    """Returns (the pieces of the next of ``ranks`` ranks, the pieces that are left), both from long to short."""
    tokens, work = (sum(each) / ranks for each in zip(*((piece.tokens, piece.work) for piece in line), strict=True))
    front, back = _two_ends(line, tokens, work)
    taken, rest = _cut(line, front)
    middle, ends = _cut(rest, sum(piece.tokens for piece in rest) - back)
    cuts = _documents(middle) & _documents([*taken, *ends])
    best = min(_shares(line, tokens, work, len(line) - len(ends)), key=lambda share: share.effort)
    if best.effort[0] or best.effort[1] > len(cuts):
        return [*taken, *ends], middle
    mine = set(best.mine)
    taken, left = _cut([piece for at, piece in enumerate(line) if at not in mine], best.front)
    return [*taken, *(line[at] for at in best.mine)], left


def _documents(pieces: list[_Piece]) -> set[int]:
    return {piece.document for piece in pieces}


def _shares(line: list[_Piece], tokens: float, work: float, exact: int) -> Iterator[_Share]:
    """Yields shares of about so many tokens and so much work that need one cut, or none.

    Args:
        exact: how many pieces are in front of the place at which a second cut would be exact.
    """
    first, last = max(0, exact - OPTIONS // 2), min(len(line), exact + OPTIONS // 2)
    before = _sums(line[:first])
    behind = _sums(line[last:])[-1]
    for chosen in product((False, True), repeat=last - first):
        mine = [*compress(range(first, last), chosen), *range(last, len(line))]
        others = [piece for piece, taken in zip(line[first:last], chosen, strict=True) if not taken]
        of_mine = [
            behind[0] + sum(line[at].tokens for at in mine if at < last),
            behind[1] + sum(line[at].work for at in mine if at < last),
        ]
        for front, of_front, cut in _stops(line[:first], before, others, work - of_mine[1]):
            off = abs(front + of_mine[0] - tokens) / tokens, abs(of_front + of_mine[1] - work) / work
            even = off[0] <= TOKEN_SLACK and off[1] <= WORK_SLACK
            yield _Share((not even, cut, max(off)), front, tuple(mine))


def _sums(pieces: list[_Piece]) -> list[tuple[int, int]]:
    """Returns the tokens and the work before each piece, and of all."""
    tokens = accumulate((piece.tokens for piece in pieces), initial=0)
    return list(zip(tokens, accumulate((piece.work for piece in pieces), initial=0), strict=True))


def _stops(
    first: list[_Piece], sums: list[tuple[int, int]], then: list[_Piece], work: float
) -> Iterator[tuple[float, float, int]]:
    """Yields (tokens, their work, cuts) of the front of a line: so much work, and to the ends of its last document.

    Args:
        first, then: the line in two parts; sums: of the first part, by ``_sums``.
    """
    at = bisect_right(sums, work, key=lambda each: each[1]) - 1
    before, done = sums[max(at, 0)]
    for piece in [*first[at : at + 1], *then] if at >= 0 else []:
        if work < done + piece.work:
            inside = (work - done) / (piece.length + 1)
            yield before + inside, work, int(inside > 0)
            yield before + piece.tokens, done + piece.work, 0
            break
        before, done = before + piece.tokens, done + piece.work
    yield before, done, 0


def _cut(line: list[_Piece], tokens: float) -> tuple[list[_Piece], list[_Piece]]:
    """Returns the pieces before and behind a number of tokens, to the nearest one behind whole pairs of tokens."""
    for at, piece in enumerate(line):
        if tokens < piece.tokens:
            stop = min(piece.start + max(0, 2 * round(tokens / 2)), piece.stop)
            parts = piece._replace(stop=stop), piece._replace(start=stop)
            before, behind = ([part] if part.tokens else [] for part in parts)
            return [*line[:at], *before], [*behind, *line[at + 1 :]]
        tokens -= piece.tokens
    return line, []


def _two_ends(line: list[_Piece], tokens: float, work: float) -> tuple[float, int]:
    """Returns how many tokens of the front and of the back of a line have together so many tokens and so much work."""
    starts = [0, *accumulate(piece.tokens for piece in line)]
    sums = [0, *accumulate(piece.work for piece in line)]

    def work_before(place: float) -> float:
        at = min(bisect_right(starts, place), len(line)) - 1
        return sums[at] + (place - starts[at]) * (line[at].length + 1)

    # The fewest tokens from the back with which the rank has no more than its share of work.
    few, many = 0, int(tokens)
    while few < many:
        back = (few + many) // 2
        if work_before(tokens - back) + sums[-1] - work_before(starts[-1] - back) <= work + 0.5:
            many = back
        else:
            few = back + 1
    return tokens - few, few
