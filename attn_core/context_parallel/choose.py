"""Chooses the strategy that exchanges keys and values, and the layout of a row that is not cut yet, and says why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

from attn_core.call.kinds import is_host_int
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import Bands, ContextCall, check_spec, kv_repeats, plan_spec
from attn_core.context_parallel.cost import GIB, MEASURED_ON, Cost, cost_of
from attn_core.context_parallel.layout import check_layout, layout_for_window
from attn_core.context_parallel.plan import AxisSizes, outer_and_inner
from attn_core.errors import ShapeError, SpecError, shown
from attn_core.selection import Target
from attn_core.selection.choice import lane_of

CANDIDATES = {1: ("all_gather", "ulysses", "ring"), 2: ("all_gather", "ring")}
"""The strategies by the number of axes; the earlier one wins a tie. On two axes they are for the outer axis."""

LAYOUTS = ("zigzag", "contiguous")
"""The layouts that are compared for every row, before those for documents and for a causal window; the earlier one wins
a tie. Stripes are left out: they have the pairs of a zigzag and no borders."""


def check_strategy(strategy: object, head_groups: object) -> None:
    """Raises SpecError unless ``strategy`` is a name or None, and ``head_groups`` is a positive integer or None."""
    if strategy is not None and not (isinstance(strategy, str) and strategy):
        raise SpecError(f"strategy={shown(strategy)}: expected a strategy's name, or None for automatic choice")
    if head_groups is not None and not (is_host_int(head_groups) and head_groups > 0):  # type: ignore[operator]
        raise SpecError(f"head_groups={shown(head_groups)}: expected the number of groups of heads, 1 or more")


@dataclass(frozen=True)
class Candidate:
    """A strategy with its cost, and every reason why it cannot run the call.

    Attributes:
        cost: None if ranks cannot share the heads.
    """

    strategy: str
    refusals: tuple[str, ...]
    cost: Cost | None


@dataclass(frozen=True)
class Choice:
    """The strategy of a call, and why it was chosen: ``str(choice)`` is the explanation.

    Attributes:
        spec, documents, layout, axes, memory, bands, launched: the arguments of ``choose``.
        requested: the strategy that the caller named, or None.
        strategy: the chosen strategy, or None if none can run the call.
    """

    spec: AttentionSpec
    documents: tuple[int, ...] | None
    layout: str
    axes: AxisSizes
    memory: float | None
    requested: str | None
    strategy: str | None
    bands: Bands
    launched: bool

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """All strategies, in order. If the caller named one, only this property plans the others."""
        return tuple(map(self.candidate, CANDIDATES[len(self.axes)]))

    def candidate(self, strategy: str) -> Candidate:
        """Returns the candidate of a strategy."""
        return _evaluate(replace(self, requested=None, strategy=None), strategy)

    @property
    def cost(self) -> Cost | None:
        """The cost of the chosen strategy."""
        return None if self.strategy is None else self.candidate(self.strategy).cost

    def reasons(self, strategy: str) -> tuple[str, ...]:
        """Returns why a strategy cannot run the call; empty if it can."""
        return self.candidate(strategy).refusals

    def __str__(self) -> str:
        ranks = " x ".join(map(str, self.axes))
        lines = [f"context parallelism over {ranks} ranks, {self.layout}: {self.spec}"]
        candidates = self.candidates
        width = max(len(self._name(one.strategy)) for one in candidates)
        shortest = min((one.cost.order[0] for one in candidates if one.cost and not one.refusals), default=0.0)
        for one in candidates:
            verdict = "refused: " + "; ".join(one.refusals)
            if one.cost and not one.refusals:
                verdict = f"{_ratio(one.cost, shortest)} of the shortest time, {one.cost}"
            chosen = "selected: " if one.strategy == self.strategy else ""
            lines.append(f"  {self._name(one.strategy):<{width}}  {chosen}{verdict}")
        memory = "" if self.memory is None else f"; {self.memory / GIB:.2f} GiB may be used on a rank"
        return "\n".join([*lines, f"  (compared by times measured on {MEASURED_ON}{memory})"])

    def _name(self, strategy: str) -> str:
        return strategy if len(self.axes) == 1 else f"{strategy} x ulysses"


def _ratio(cost: Cost, shortest: float) -> str:
    return f"{cost.order[0] / shortest if shortest else 1:.2f}"


def compared(choices: tuple[Choice, ...]) -> str:
    """Returns a line that compares the choices of several layouts, the fastest first."""
    costs = [(one, one.cost) for one in choices if one.cost]
    ratios = (f"{one.layout} {_ratio(cost, costs[0][1].order[0])} ({one.strategy})" for one, cost in costs)
    return f"layouts: {'; '.join(ratios)}"


class Explanation(NamedTuple):
    """How a call runs, and why: ``str(explanation)`` is the text.

    Attributes:
        choice: the strategies, and why one was chosen.
        call: the plan, and the backend of every tile.
        target: the framework and the device.
        program_faults: ``((backend, reason), ...)``: why this installation cannot build kernels that XLA would launch.
        layouts: the choices of all layouts, the fastest first, if the caller let us choose one; else empty.
    """

    choice: Choice
    call: ContextCall
    target: Target
    program_faults: tuple[tuple[str, str], ...] = ()
    layouts: tuple[Choice, ...] = ()

    @property
    def lanes(self) -> tuple[tuple[str, tuple[str, tuple[str, ...]] | None], ...]:
        """Each distinct ``(backend, lane)`` of the tiles; a lane is that of ``Selection.lane``."""
        lanes = []
        for spec, name in self.call.backends:
            faults = tuple(why for backend, why in self.program_faults if backend == name)
            lanes.append((name, lane_of(name, spec, self.target, faults)))
        return tuple(dict.fromkeys(sorted(lanes, key=lambda each: each[0])))

    def __str__(self) -> str:
        names = [name if lane is None else f"{name}, {lane[0]} lane" for name, lane in self.lanes]
        whys = [
            f"  {name} by callback: {'; '.join(lane[1]) or 'it hands out no compiled kernels'}"
            for name, lane in self.lanes
            if lane is not None and lane[0] == "callback"
        ]
        plan = self.call.plan
        layouts = [f"  {compared(self.layouts)}"] if self.layouts else []
        tokens = [f"  tokens of a rank: {plan.q_layout.counts}"] if plan.q_layout.kind == "documents" else []
        lines = [
            str(self.choice),
            f"  steps: {len(plan.steps)}; groups of heads: {self.call.head_groups}; copies of each kv head: "
            f"{self.call.repeats}; balance: {plan.balance:.3f}",
            *layouts,
            *tokens,
            f"  backends: {'; '.join(dict.fromkeys(names)) or 'none, nothing is visible'}",
            *whys,
        ]
        return "\n".join(lines)


class NoStrategyError(NotImplementedError):
    """No strategy, or not the requested one, can run a call. ``error.choice`` has every reason."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        lead = "no strategy can share this call"
        if choice.requested:
            lead = (
                f"strategy={shown(choice.requested)} cannot share this call, and one asked for by name never falls back"
            )
        super().__init__(f"{lead}\n{choice}")

    def __reduce__(self) -> tuple[type[NoStrategyError], tuple[Choice]]:
        return NoStrategyError, (self.choice,)  # an exception pickles by its message, but __init__ takes the choice


@lru_cache(maxsize=1024)
def choose(
    spec: AttentionSpec,
    documents: tuple[int, ...] | None,
    layout: str,
    axes: AxisSizes,
    memory: float | None = None,
    strategy: str | None = None,
    bands: Bands = None,
    *,
    launched: bool = True,
) -> Choice:
    """Chooses the strategy that takes the shortest time, among those that can run the call. A pure function, cached.

    Args:
        spec: the whole call, as on one device.
        documents: the offsets of the whole row's packed documents.
        layout: see ``attn_core.context_parallel.layout.build_layout``.
        axes: ``(ranks,)`` or ``(outer, inner)``.
        memory: the bytes that the call may use on a rank, inputs and results included; None for no limit. It must be
            the same on every rank, or ranks may choose differently.
        strategy: None to choose. A named strategy is used, or raises an error: it never falls back to another one.
        bands: the whole mask of a call with key ranges.
        launched: whether a host launches every kernel, see ``cost_of``.

    Raises:
        NoStrategyError: if no strategy can run the call, with every reason.
        SpecError: for arguments that context parallelism does not support, and unknown names.
    """
    check_spec(spec, bands)
    if len(axes) not in CANDIDATES or any(size < 1 for size in axes):
        raise SpecError(f"axes={axes}: expected (ranks,) or (outer, inner), each of at least one rank")
    check_layout(layout)
    names = CANDIDATES[len(axes)]
    if strategy is not None and strategy not in names:
        count = "1 axis" if len(axes) == 1 else f"{len(axes)} axes"
        raise SpecError(f"strategy={shown(strategy)}: expected one of {', '.join(names)} on {count}, or None")
    undecided = Choice(spec, documents, layout, axes, memory, strategy, None, bands, launched)
    # A named strategy is the only one that is planned here.
    asked = [undecided.candidate(name) for name in names if strategy in (None, name)]
    able = [(one.cost.order, one.strategy) for one in asked if one.cost and not one.refusals]
    if not able:
        raise NoStrategyError(undecided)
    # ``min`` returns the first of equal times, so CANDIDATES' order decides ties.
    return replace(undecided, strategy=min(able, key=lambda one: one[0])[1])


def choose_layout(
    spec: AttentionSpec,
    documents: tuple[int, ...] | None,
    axes: AxisSizes,
    memory: float | None = None,
    strategy: str | None = None,
    bands: Bands = None,
    *,
    launched: bool = True,
) -> tuple[Choice, ...]:
    """Returns the choice of every layout that can run the call, the fastest first.

    Args:
        spec, documents, axes, memory, strategy, bands, launched: as in ``choose``.

    Raises:
        NoStrategyError: if no layout can run the call, with every reason in the first one.
        SpecError: for arguments that context parallelism does not support.
    """
    names = list(LAYOUTS)
    if documents is not None and documents[-1] >= prod(axes):
        names.append("documents")
    edge = band(spec)
    if documents is None and bands is None and edge.left is not None and edge.right == 0:
        names.append(layout_for_window(edge.left + 1))
    able, refused = [], []
    for name in names:
        try:
            able.append(choose(spec, documents, name, axes, memory, strategy, bands, launched=launched))
        except NoStrategyError as error:
            refused.append(error)
    if not able:
        raise refused[0]
    return tuple(sorted(able, key=lambda choice: choice.cost.order))  # type: ignore[union-attr]


@lru_cache(maxsize=1024)
def _evaluate(asked: Choice, strategy: str) -> Candidate:
    """Returns the candidate of a strategy for what an undecided choice asks."""
    spec, axes, memory = asked.spec, asked.axes, asked.memory
    try:
        # Heads come first: without a number of copies there is no plan.
        kv_repeats(spec.num_heads, spec.num_kv_heads, outer_and_inner(axes, strategy, 1)[1])
    except ShapeError as error:
        return Candidate(strategy, (str(error),), None)
    plan = plan_spec(spec, asked.documents, strategy, asked.layout, axes, asked.bands)
    cost = cost_of(spec, plan, launched=asked.launched)
    refusals: tuple[str, ...] = ()
    if memory is not None and cost.held > memory:
        refusals = (f"memory: {cost.held / GIB:.2f} GiB a rank, more than the {memory / GIB:.2f} GiB it may use",)
    return Candidate(strategy, refusals, cost)
