"""Layouts: which positions of a row each rank holds, as runs of plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError

LAYOUTS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True, order=True, slots=True)
class Run:
    """``count`` positions from ``start`` on, ``stride`` apart, in neighbouring places of a shard."""

    start: int
    count: int  # type: ignore[assignment]  # hides the tuple's count(), which nobody calls
    stride: int = 1

    @property
    def last(self) -> int:
        """The last position."""
        return self.start + (self.count - 1) * self.stride


@dataclass(frozen=True)
class Layout:
    """A row of ``length`` positions over ranks.

    Attributes:
        kind: one of LAYOUTS.
        length: the positions.
        shard: places on every rank; the last places of a rank may hold no position.
        runs: for each rank the positions at its places, from the first place on.
    """

    kind: str
    length: int
    shard: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.runs)

    def held(self, rank: int) -> int:
        """The number of positions that a rank holds."""
        return sum(run.count for run in self.runs[rank])


def layout(kind: str, length: int, outer: int, inner: int = 1, documents: Sequence[int] | None = None) -> Layout:
    """Spreads a row over ``outer * inner`` ranks.

    Args:
        kind: ``"contiguous"``: a piece for each rank. ``"zigzag"``: rank r of P holds the pieces r and 2P - 1 - r of
            2P, so that every rank sees as much of a causal mask; with ``documents``, those pieces of every document.
            ``"striped"``: rank r holds the positions r, r + P, r + 2P, ...
        inner: number of neighbouring ranks that share a part of the row (Ulysses).
        documents: the offsets ``[documents + 1]`` of packed documents, which the other layouts may cut anywhere.

    Raises:
        SpecError, ShapeError: for invalid arguments.
    """
    if kind not in LAYOUTS:
        raise SpecError(f"layout={kind!r}: expected one of {', '.join(LAYOUTS)}")
    if not is_host_int(length) or length < 0:
        raise SpecError(f"length={length!r}: expected the positions of the whole row, an integer of 0 or more")
    if outer < 1 or inner < 1:
        raise SpecError(f"world={outer} x {inner}: expected at least one rank each way")
    world = outer * inner
    if documents is not None:
        check_documents(documents, length)
    if kind == "striped":
        # Neighbours hold neighbouring stripes of their part, so that their positions together are one finer stripe.
        starts = (outer * (rank % inner) + rank // inner for rank in range(world))
        runs = [_kept([Run(start, -(-(length - start) // world), world)]) for start in starts]
    elif kind == "contiguous":
        runs = [_kept([piece]) for piece in pieces(0, length, world)]
    else:
        runs = _zigzag(documents if documents is not None else (0, length), world)
    return Layout(kind, length, max(sum(run.count for run in held) for held in runs), tuple(runs))


def check_documents(documents: Sequence[int], length: int) -> None:
    """Raises ShapeError unless the offsets describe documents that fill a row of ``length`` positions."""
    rising = all(start <= stop for start, stop in pairwise(documents))
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rising:
        shown = f"{tuple(documents[:8])}{'...' if len(documents) > 8 else ''}"
        raise ShapeError(f"seq_info: expected offsets that rise from 0 to the row's {length} positions, got {shown}")


def axis_of(dim: int, rank: int) -> int:
    """An axis of an array of ``rank`` axes, counted from the front; raises ShapeError if there is no such axis."""
    if not (is_host_int(dim) and -rank <= dim < rank):
        raise ShapeError(f"dim={dim!r}: expected one of the {rank} axes of x")
    return dim % rank


def pieces(start: int, stop: int, count: int) -> list[Run]:
    """A range in ``count`` pieces whose sizes differ by one at most."""
    size = stop - start
    edges = [start + at * size // count for at in range(count + 1)]
    return [Run(first, last - first) for first, last in pairwise(edges)]


def _zigzag(documents: Sequence[int], world: int) -> list[tuple[Run, ...]]:
    """Gives each rank a piece of every document's first half and the mirrored piece of its second half.

    If pieces differ in size, the rank that holds least gets the largest pair.
    """
    held: list[list[Run]] = [[] for _ in range(world)]
    loads = [0] * world
    for start, stop in pairwise(documents):
        parts = pieces(start, stop, 2 * world)
        sizes = [parts[pair].count + parts[-1 - pair].count for pair in range(world)]
        ranks: Sequence[int] = range(world)
        order: Sequence[int] = range(world)
        if len(set(sizes)) > 1 and len(documents) > 2:
            ranks = sorted(range(world), key=lambda rank: (loads[rank], rank))
            order = sorted(range(world), key=lambda pair: (-sizes[pair], pair))
        for rank, pair in zip(ranks, order, strict=True):
            held[rank] += [parts[pair], parts[-1 - pair]]
            loads[rank] += sizes[pair]
    return [_kept(runs) for runs in held]


def _kept(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs that are not empty, with neighbours joined."""
    joined: list[Run] = []
    for run in runs:
        if run.count <= 0:
            continue
        if joined and joined[-1].stride == run.stride == 1 and joined[-1].start + joined[-1].count == run.start:
            joined[-1] = Run(joined[-1].start, joined[-1].count + run.count)
        else:
            joined.append(run)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Block:
    """The positions of several ranks' shards, in order.

    Attributes:
        runs: the positions, place by place.
        ranks: the ranks whose shards, end to end, hold them.
    """

    runs: tuple[Run, ...]
    ranks: tuple[int, ...]

    @property
    def count(self) -> int:  # type: ignore[override]
        """How many positions there are."""
        return sum(run.count for run in self.runs)


def block(layout: Layout, ranks: Sequence[int]) -> Block:
    """The positions that ``ranks`` hold: one rank's in the order of its shard, several ranks' in rising order."""
    if len(ranks) == 1:
        return Block(layout.runs[ranks[0]], tuple(ranks))
    runs = sorted(run for rank in ranks for run in layout.runs[rank])
    if layout.kind == "striped" and runs:  # stripes with evenly spaced starts are one finer stripe
        return Block((Run(runs[0].start, sum(run.count for run in runs), layout.world // len(ranks)),), tuple(ranks))
    return Block(_kept(runs), tuple(ranks))
