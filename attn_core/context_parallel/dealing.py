"""Deals the tokens of a row to ranks, by the work that they have. Apart from ``layout``, which only needs the ranges.

``deal`` has packed documents: short ones stay whole, long ones are cut, so that ranks have equal work and almost equal
tokens. ``cut_for_window`` has a causal window.

A document is cut from both ends to its middle, as a zigzag is. Its i-th token and its i-th last token see together
``length + 1`` keys under a causal mask, so a rank that takes such pairs has the same share of the document's work as
of its tokens. All documents are one line of tokens, the longest document first. Each rank in turn takes its share of
work from the front of the line, where tokens have much work, and whole documents from the back, where they have
little, until it has its share of tokens, too. If no whole documents fit, one is cut at the back. Two cuts are enough
for any share of work and of tokens, so P ranks make at most 2 (P - 1) cuts. A cut may fall inside a pair, so with two
cuts a rank has its share of tokens, rounded down or up: no rank is empty if there are as many tokens as ranks. Without
a causal mask work is proportional, too. A window takes more work from long documents than from short ones, so ranks
are less even.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, compress, groupby, pairwise, product
from math import ceil, floor
from typing import NamedTuple

TOKEN_SLACK = 1 / 64
"""The share by which a rank's tokens may differ from an even share of what is left, and be more than the mean of all
ranks, to save a cut. Other layers than attention compute as many tokens as the rank with the most has."""
WORK_SLACK = 1 / 128
"""The same for a rank's work."""
OPTIONS = 6
"""How many documents, those around the place at which a cut would be exact, are tried in every combination."""
NEARBY = 2
"""How many tokens the second cut is moved each way, to find the most even work of whole tokens."""

Range = tuple[int, int]
"""Positions ``[start, stop)``."""


class _Piece(NamedTuple):
    """Tokens ``[start, stop)`` of a document of ``length``, counted from both of its ends to its middle.

    Tokens 2 i and 2 i + 1 are the document's i-th and i-th last.
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
        """Twice the keys that the tokens see under a causal mask: ``length + 1`` for each token of whole pairs."""
        return self._work_before(self.stop) - self._work_before(self.start)

    def _work_before(self, token: int) -> int:
        # The first token of pair i sees i + 1 keys, so twice them are ``length - token`` fewer than a pair's mean.
        return token * (self.length + 1) - (token % 2) * (self.length - token)

    def tokens_of(self, work: float) -> int:
        """Returns how many first tokens have about so much work, which is less than the piece's."""
        work += self._work_before(self.start)
        below = max(self.start, int(work / (self.length + 1)))
        return min(below, below + 1, key=lambda stop: abs(self._work_before(stop) - work)) - self.start

    def positions(self, first: int) -> tuple[Range, ...]:
        """Returns the positions of the tokens of a document that begins at ``first``: two ranges if more is behind."""
        # The first half of a pair is at the document's beginning, so an odd cut leaves one token more there.
        head, tail = first + (self.start + 1) // 2, first + self.length - self.start // 2
        if self.stop == self.length:
            return ((head, tail),)
        ranges = (head, first + (self.stop + 1) // 2), (first + self.length - self.stop // 2, tail)
        return tuple((start, stop) for start, stop in ranges if start < stop)


@lru_cache(maxsize=64)
def deal(documents: tuple[int, ...], world: int) -> tuple[tuple[Range, ...], ...]:
    """Returns each rank's positions as ranges, in the order of its shard; cached.

    Pieces of cut documents come first, at about the same places on every rank, because ranks send the same places: in
    front those that ranks before it have, too. Then come whole documents. Each is in the order of positions.

    Args:
        documents: the offsets ``[documents + 1]`` of packed documents.
    """
    lengths = [stop - start for start, stop in pairwise(documents)]
    order = sorted((at for at, length in enumerate(lengths) if length), key=lambda at: (-lengths[at], at))
    line = [_Piece(at, 0, lengths[at], lengths[at]) for at in order]
    tokens, work = (total / world for total in _total(line))
    most = max(ceil(tokens), floor(tokens * (1 + TOKEN_SLACK))), work * (1 + WORK_SLACK)
    ranks = []
    for left in range(world, 1, -1):
        taken, line = _split(line, left, most)
        ranks.append(taken)
    ranks.append(line)
    first = {piece.document: rank for rank in range(world - 1, -1, -1) for piece in ranks[rank]}

    def in_shard(piece: _Piece) -> tuple[bool, int, int]:
        whole = piece.tokens == piece.length
        return whole, 0 if whole else first[piece.document], piece.document

    return tuple(
        tuple(
            part
            for document, mine in groupby(sorted(pieces, key=in_shard), key=lambda piece: piece.document)
            # In the order of positions, also if it was cut at the front and at the back, so that few calls compute it.
            for part in sorted(part for piece in mine for part in piece.positions(documents[document]))
        )
        for pieces in ranks
    )


class _Goal(NamedTuple):
    """The tokens and the work of a line, the ranks that share it, and the most of both that a rank may have."""

    tokens: int
    work: int
    ranks: int
    most: tuple[float, float]

    def off(self, tokens: int, work: int) -> tuple[float, float]:
        """Returns how far a rank is from an even share of tokens and of work, relative to it."""
        return abs(tokens * self.ranks - self.tokens) / self.tokens, abs(work * self.ranks - self.work) / self.work

    def allows(self, tokens: int, work: int, exact: float) -> bool:
        """Returns whether a rank is even enough, and leaves other ranks no more than they may have.

        Args:
            exact: how far the work of two exact cuts is off, because tokens are whole.
        """
        off = self.off(tokens, work)
        rounded = abs(tokens * self.ranks - self.tokens) < self.ranks  # an even share of tokens, rounded down or up
        most = max(tokens, (self.tokens - tokens) / (self.ranks - 1)), max(work, (self.work - work) / (self.ranks - 1))
        if most[0] > self.most[0] or not (rounded or off[0] <= TOKEN_SLACK):
            return False
        return off[1] <= exact or (off[1] <= WORK_SLACK and most[1] <= self.most[1])


class _Share(NamedTuple):
    """What a rank may take: the first ``front`` tokens of the pieces that are not ``mine``, and ``mine``.

    ``effort`` is the lower the better: the number of cuts, and how far the share is off.
    """

    effort: tuple[int, float]
    front: int
    mine: tuple[int, ...]


def _split(line: list[_Piece], ranks: int, most: tuple[float, float]) -> tuple[list[_Piece], list[_Piece]]:
    """Returns (the pieces of the next of ``ranks`` ranks, the pieces that are left), both from long to short."""
    goal = _Goal(*_total(line), ranks, most)
    taken, middle, ends = min(_two_ends(line, goal), key=lambda parts: max(goal.off(*_total([*parts[0], *parts[2]]))))
    cuts = len({piece.document for piece in middle} & {piece.document for piece in [*taken, *ends]})
    off = goal.off(*_total([*taken, *ends]))
    best = min(_shares(line, goal, len(line) - len(ends), off[1]), key=lambda share: share.effort, default=None)
    if best is None or best.effort > (cuts, max(off)):
        return [*taken, *ends], middle
    mine = set(best.mine)
    taken, left = _cut([piece for at, piece in enumerate(line) if at not in mine], best.front)
    return [*taken, *(line[at] for at in best.mine)], left


def _shares(line: list[_Piece], goal: _Goal, place: int, exact: float) -> Iterator[_Share]:
    """Yields shares that are even enough and need one cut, or none.

    Args:
        place: how many pieces are in front of the place at which a second cut would be exact.
        exact: how far the work of two exact cuts is off.
    """
    first, last = max(0, place - OPTIONS // 2), min(len(line), place + OPTIONS // 2)
    before = _sums(line[:first])
    behind = _total(line[last:])
    for chosen in product((False, True), repeat=last - first):
        others = [piece for piece, taken in zip(line[first:last], chosen, strict=True) if not taken]
        tokens, work = map(sum, zip(behind, _total([*compress(line[first:last], chosen)]), strict=True))
        for front, of_front, cut in _stops(line[:first], before, others, goal.work / goal.ranks - work):
            if goal.allows(front + tokens, of_front + work, exact):
                mine = *compress(range(first, last), chosen), *range(last, len(line))
                yield _Share((cut, max(goal.off(front + tokens, of_front + work))), front, mine)


def _sums(pieces: list[_Piece]) -> list[tuple[int, int]]:
    """Returns the tokens and the work before each piece, and of all."""
    tokens = accumulate((piece.tokens for piece in pieces), initial=0)
    return list(zip(tokens, accumulate((piece.work for piece in pieces), initial=0), strict=True))


def _total(pieces: list[_Piece]) -> tuple[int, int]:
    """Returns the tokens and the work of pieces."""
    return sum(piece.tokens for piece in pieces), sum(piece.work for piece in pieces)


def _stops(
    first: list[_Piece], sums: list[tuple[int, int]], then: list[_Piece], work: float
) -> Iterator[tuple[int, int, int]]:
    """Yields (tokens, their work, cuts) of the front of a line: about so much work, and to the ends of documents there.

    Args:
        first, then: the line in two parts; sums: of the first part, by ``_sums``.
    """
    at = bisect_right(sums, work, key=lambda each: each[1]) - 1
    before, done = sums[max(at, 0)]
    for piece in [*first[at : at + 1], *then] if at >= 0 else []:
        if work < done + piece.work:
            inside = piece.tokens_of(work - done)
            of_inside = piece._replace(stop=piece.start + inside).work
            yield before + inside, done + of_inside, int(0 < inside < piece.tokens)
            yield before + piece.tokens, done + piece.work, 0
            break
        before, done = before + piece.tokens, done + piece.work
    yield before, done, 0


def _cut(line: list[_Piece], tokens: int) -> tuple[list[_Piece], list[_Piece]]:
    """Returns the pieces before and behind a number of tokens."""
    for at, piece in enumerate(line):
        if tokens < piece.tokens:
            stop = piece.start + tokens
            before = [piece._replace(stop=stop)] if tokens else []
            return [*line[:at], *before], [piece._replace(start=stop), *line[at + 1 :]]
        tokens -= piece.tokens
    return line, []


def _two_ends(line: list[_Piece], goal: _Goal) -> Iterator[tuple[list[_Piece], list[_Piece], list[_Piece]]]:
    """Yields a line's (front, middle, back), with about a rank's share of work in the front and the back together, and
    its share of tokens, rounded down or up."""
    tokens = goal.tokens / goal.ranks
    starts = [0, *accumulate(piece.tokens for piece in line)]
    # As if all tokens of a document had its mean work: half a pair at one end must not ask for a cut at the other.
    sums = [0, *accumulate(piece.tokens * (piece.length + 1) for piece in line)]

    def work_before(place: float) -> float:
        at = min(bisect_right(starts, place), len(line)) - 1
        return sums[at] + (place - starts[at]) * (line[at].length + 1)

    def has_its_share(back: int) -> bool:
        taken = work_before(tokens - back) + sums[-1] - work_before(starts[-1] - back)
        return taken <= sums[-1] / goal.ranks + 0.5

    # The fewest tokens from the back with which the rank has no more than its share of work.
    few = bisect_left(range(int(tokens)), True, key=has_its_share)
    for both in sorted({floor(tokens), ceil(tokens)}):
        for back in range(max(0, few - NEARBY), min(few + NEARBY, both) + 1) if few else (0,):
            taken, rest = _cut(line, both - back)
            yield taken, *_cut(rest, goal.tokens - both)


def cut_for_window(length: int, world: int, window: int) -> tuple[tuple[Range, ...], ...]:
    """Returns each rank's positions for a causal window, as ranges in rising order: equal tokens, equal visible pairs.

    The first tokens of a row see fewer keys than the window, so the first of equal contiguous pieces has less work.
    Here each rank has one piece of these first tokens, so that their missing keys are shared evenly, and one piece of
    the rest.

    Token i of the first W misses W - 1 - i keys, and the first x of them miss together about ``(W^2 - (W - x)^2) / 2``.
    So rank r of P begins at ``W (1 - sqrt(1 - r / P))``. Of the rest, the last rank has the piece that continues its
    first one, and then ranks 0, 1, ... follow: each has the keys that the rank after it sees, as in contiguous pieces.

    Args:
        window: the number of keys that a query sees, itself included.
    """
    reach = min(window, length)
    edges = [at * length // world for at in range(world + 1)]
    sizes = [stop - start for start, stop in pairwise(edges)]
    shares = [round(reach * (1 - (1 - rank / world) ** 0.5)) for rank in range(world + 1)]
    # A window that is much larger than a shard would give the last rank more first tokens than it may have.
    firsts = [min(stop - start, size) for (start, stop), size in zip(pairwise(shares), sizes, strict=True)]
    starts = list(accumulate(firsts, initial=0))
    order = [world - 1, *range(world - 1)]
    later = list(accumulate((sizes[rank] - firsts[rank] for rank in order), initial=starts[-1]))
    rests = dict(zip(order, pairwise(later), strict=True))
    return tuple(((starts[rank], starts[rank + 1]), rests[rank]) for rank in range(world))
