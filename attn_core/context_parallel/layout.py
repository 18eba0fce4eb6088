"""Layouts: the positions of a row that each rank holds, as runs of plain numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from attn_core.call.kinds import is_host_int
from attn_core.context_parallel.dealing import cut_for_window, deal
from attn_core.errors import ShapeError, SpecError, shown

LAYOUTS = ("contiguous", "zigzag", "striped", "documents")
"""The layouts without a number. Besides, ``"window:W"`` has the number of keys W that a query sees."""
_WINDOW = "window:"
_LARGEST = 2**63 - 1
"""Of a row's length and a window: what an int64 holds."""


@dataclass(frozen=True, order=True, slots=True)
class Run:
    """``count`` positions from ``start`` on, ``stride`` apart, at consecutive places of a shard."""

    start: int
    count: int
    stride: int = 1

    @property
    def last(self) -> int:
        """The last position."""
        return self.start + (self.count - 1) * self.stride


@dataclass(frozen=True)
class Layout:
    """A row of ``length`` positions, spread over ranks.

    Attributes:
        kind: one of LAYOUTS, or ``"window:W"``.
        length: the number of positions.
        shard: the number of places on every rank. The last places of a rank may hold no position.
        runs: for each rank, the positions at its places, from the first place on.
    """

    kind: str
    length: int
    shard: int
    runs: tuple[tuple[Run, ...], ...]

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.runs)

    def position_count(self, rank: int) -> int:
        """Returns the number of positions that a rank holds."""
        return sum(run.count for run in self.runs[rank])

    @property
    def position_counts(self) -> tuple[int, ...]:
        """The number of positions that each rank holds."""
        return tuple(self.position_count(rank) for rank in range(self.world))

    @property
    def counts(self) -> str:
        """The fewest and the most positions that a rank holds, as a phrase."""
        counts = self.position_counts
        return f"{min(counts)} to {max(counts)}, in shards of {self.shard} places"


def build_layout(kind: str, length: int, outer: int, inner: int = 1, documents: Sequence[int] | None = None) -> Layout:
    """Spreads a row over ``outer * inner`` ranks.

    Args:
        kind: ``"contiguous"``: each rank holds one piece. ``"zigzag"``: the row is cut into 2P pieces for P ranks, and
            rank r holds the pieces r and 2P - 1 - r, so that all ranks have equal work under a causal mask; if there
            are ``documents``, every document is cut like this. ``"striped"``: rank r holds r, r + P, r + 2P, ...
            ``"documents"``: see ``dealing.deal``. ``"window:W"``: see ``dealing.cut_for_window``.
        inner: the number of consecutive ranks that share a part of the row by heads (Ulysses).
        documents: the offsets ``[documents + 1]`` of packed documents. ``"contiguous"``, ``"striped"`` and
            ``"window:W"`` cut documents anywhere, and ``"documents"`` needs them.

    Raises:
        SpecError, ShapeError: for invalid arguments.
    """
    window = check_layout(kind)
    if not is_host_int(length) or not 0 <= length <= _LARGEST:
        raise SpecError(
            f"length={shown(length)}: expected the positions of the whole row, an integer from 0 to 2^63 - 1"
        )
    if outer < 1 or inner < 1:
        raise SpecError(f"world={outer} x {inner}: expected at least one rank each way")
    world = outer * inner
    if documents is not None:
        check_documents(documents, length)
    if kind == "striped":
        # The ranks of a part hold adjacent stripes, so that together their positions are one finer stripe.
        starts = (outer * (rank % inner) + rank // inner for rank in range(world))
        # The count is rounded up. It is 0 or negative for ranks beyond a short row, and ``_join_runs`` drops such runs.
        runs = [_join_runs([Run(start, -(-(length - start) // world), world)]) for start in starts]
    elif kind == "contiguous":
        runs = [_join_runs([piece]) for piece in cut_evenly(0, length, world)]
    elif kind == "documents" or window is not None:
        ranges = _dealt(documents, world) if window is None else cut_for_window(length, world, window)
        runs = [_join_runs([Run(start, stop - start) for start, stop in of_rank]) for of_rank in ranges]
    else:
        runs = _zigzag_runs(documents if documents is not None else (0, length), world)
    return Layout(kind, length, max(sum(run.count for run in of_rank) for of_rank in runs), tuple(runs))


def layout_for_window(window: int) -> str:
    """Returns the name of the layout for a causal window of so many keys."""
    return f"{_WINDOW}{window}"


def check_layout(layout: object) -> int | None:
    """Returns the W of a layout ``"window:W"``; None for a layout without a number.

    Raises:
        SpecError: for anything but the name of a layout.
    """
    if isinstance(layout, str):
        if layout in LAYOUTS:
            return None
        number = layout.removeprefix(_WINDOW)
        # Only digits without a leading zero, so that one layout has one name.
        if number != layout and number.isascii() and number.isdigit() and number[0] != "0":
            # Python refuses to read thousands of digits.
            if len(number) <= len(str(_LARGEST)) and int(number) <= _LARGEST:
                return int(number)
            raise SpecError(f"layout={shown(layout)}: expected at most 2^63 - 1 keys in 'window:W'")
    raise SpecError(
        f"layout={shown(layout)}: expected one of {', '.join(LAYOUTS)}, or 'window:W' with the number of keys W that a "
        "query sees, such as 'window:4096'"
    )


def check_documents(documents: Sequence[int], length: int) -> None:
    """Raises ShapeError unless the offsets describe documents that fill a row of ``length`` positions."""
    rising = all(start <= stop for start, stop in pairwise(documents))
    if len(documents) < 2 or documents[0] != 0 or documents[-1] != length or not rising:
        shown = f"{tuple(documents[:8])}{'...' if len(documents) > 8 else ''}"
        raise ShapeError(f"seq_info: expected offsets that rise from 0 to the row's {length} positions, got {shown}")


def _dealt(documents: Sequence[int] | None, world: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Returns each rank's positions in the layout "documents".

    Raises:
        SpecError, ShapeError: without documents, and for fewer tokens than ranks.
    """
    if documents is None:
        raise SpecError("layout='documents': expected seq_info with the row's packed documents, got None")
    if documents[-1] < world:
        raise ShapeError(
            f"seq_info: expected at least {world} tokens, one for each rank of layout='documents', got {documents[-1]}"
        )
    return deal(tuple(documents), world)


def check_axis(dim: int, rank: int) -> int:
    """Returns an axis of an array of ``rank`` axes, counted from the front.

    Raises:
        ShapeError: if the array has no such axis.
    """
    if not (is_host_int(dim) and -rank <= dim < rank):
        raise ShapeError(f"dim={shown(dim)}: expected one of the {rank} axes of x")
    return dim % rank


def cut_evenly(start: int, stop: int, count: int) -> list[Run]:
    """Returns a range cut into ``count`` pieces whose sizes differ by at most one."""
    size = stop - start
    edges = [start + at * size // count for at in range(count + 1)]
    return [Run(first, last - first) for first, last in pairwise(edges)]


def _zigzag_runs(documents: Sequence[int], world: int) -> list[tuple[Run, ...]]:
    """Gives each rank one piece of every document's first half and the mirrored piece of its second half.

    If the pieces differ in size, the rank with the fewest positions so far gets the largest pair.
    """
    runs: list[list[Run]] = [[] for _ in range(world)]
    loads = [0] * world
    for start, stop in pairwise(documents):
        parts = cut_evenly(start, stop, 2 * world)
        sizes = [parts[pair].count + parts[-1 - pair].count for pair in range(world)]
        ranks: Sequence[int] = range(world)
        pairs: Sequence[int] = range(world)
        # A single row has no later document to even out the loads, and keeps the documented order: rank r has piece r.
        if len(set(sizes)) > 1 and len(documents) > 2:
            ranks = sorted(range(world), key=lambda rank: (loads[rank], rank))
            pairs = sorted(range(world), key=lambda pair: (-sizes[pair], pair))
        for rank, pair in zip(ranks, pairs, strict=True):
            runs[rank] += [parts[pair], parts[-1 - pair]]
            loads[rank] += sizes[pair]
    return [_join_runs(of_rank) for of_rank in runs]


def _join_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Drops empty runs, and joins runs that continue each other."""
    joined: list[Run] = []
    for run in runs:
        if run.count <= 0:
            continue
        # The last of P ranks has the adjacent pieces P - 1 and P of a zigzag, which are one run.
        if joined and joined[-1].stride == run.stride == 1 and joined[-1].start + joined[-1].count == run.start:
            joined[-1] = Run(joined[-1].start, joined[-1].count + run.count)
        else:
            joined.append(run)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class Block:
    """The positions of one or more ranks, in the order in which kernels see them.

    Attributes:
        runs: the positions, place by place.
        ranks: the ranks whose shards hold these positions.
    """

    runs: tuple[Run, ...]
    ranks: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of positions."""
        return sum(run.count for run in self.runs)


def build_block(layout: Layout, ranks: Sequence[int]) -> Block:
    """Returns the positions of ``ranks``: of one rank in the order of its shard, of several ranks in rising order."""
    if len(ranks) == 1:
        return Block(layout.runs[ranks[0]], tuple(ranks))
    runs = sorted(run for rank in ranks for run in layout.runs[rank])
    if layout.kind == "striped" and runs:  # the stripes start at even distances, so together they are one finer stripe
        return Block((Run(runs[0].start, sum(run.count for run in runs), layout.world // len(ranks)),), tuple(ranks))
    return Block(_join_runs(runs), tuple(ranks))
