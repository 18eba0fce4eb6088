"""The explanation of a Selection as data: the answer, a row for every backend, and which rows are worth showing.

Nothing here runs on the way to a kernel: a Selection is explained when somebody reads its text.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from attn_core import backends
from attn_core.call.pages import describe_pages
from attn_core.call.spec import AttentionSpec
from attn_core.selection.same_bits import BECAUSE, describe_same_bits
from attn_core.selection.target import Target

SELECTED, ABLE, BY_NAME, ONE_CHANGE, REFUSED = "selected", "can run it", "by name only", "one change away", "refused"
"""The verdicts on a backend. ONE_CHANGE: one installation or one other argument would lift its refusal."""

MOST_CLOSEST = 3
"""If no backend can run a call and none is one change away, this many with the fewest reasons are shown."""

EXTRAS = {"torch": "attn-core[torch]", "jax": "attn-core[jax]", "jax-tvm-ffi": "attn-core[jax]"}
"""The extra of this package that installs a requirement."""

PIP_OPTIONS = {"flash-attn": " --no-build-isolation"}
"""Options that pip needs for a package: the build of flash-attn imports torch."""

MISSING = re.compile(
    r"(?P<fault>.*(ModuleNotFoundError|PackageNotFoundError): .*) "
    r"\(needs (?P<requirement>(?P<package>[a-z0-9-]+)[<>=!~][^ ]*)( with .*)?\)"
)
"""A reason that one installation lifts, as ``Target.here`` writes it."""


class Row(NamedTuple):
    """What an explanation says about one backend.

    Attributes:
        backend: its name.
        verdict: SELECTED, ABLE, BY_NAME, ONE_CHANGE or REFUSED.
        microseconds: the predicted time; None if it is unknown or the backend cannot run the call.
        reasons: why it cannot run the call; empty if it can.
        never_run: see ``Support.never_run``.
    """

    backend: str
    verdict: str
    microseconds: float | None
    reasons: tuple[str, ...]
    never_run: str | None = None

    @property
    def why(self) -> str:
        """All reasons as text, each with the command that lifts it if there is one."""
        return "; ".join(with_remedy(reason) for reason in self.reasons)


class Decision(Protocol):
    """What an explanation reads of a Selection, which has the descriptions."""

    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def target(self) -> Target: ...
    @property
    def requested(self) -> tuple[str, ...] | None: ...
    @property
    def backend(self) -> str | None: ...
    @property
    def lane(self) -> tuple[str, tuple[str, ...]] | None: ...
    @property
    def predicted(self) -> dict[str, float]: ...
    @property
    def source(self) -> str | None: ...
    @property
    def automatic(self) -> tuple[str, ...]: ...
    @property
    def mask(self) -> str | None: ...
    @property
    def parts(self) -> str | None: ...
    @property
    def max_logit(self) -> str | None: ...
    @property
    def forward_mode(self) -> str: ...
    def reasons(self, name: str) -> tuple[str, ...]: ...


class Explanation(NamedTuple):
    """An explanation as data, which text and tables show.

    Attributes:
        selection: what is explained.
        answer: which backend runs the call, or that none does.
        faults: why each requested backend cannot run the call, if none can.
        because: why this backend was chosen; None if none was.
        lane: how JAX reaches the backend, if that has reasons.
        call: where the call would run, and its spec.
        rows: every backend: the requested ones, the candidates of automatic choice, best first, and the others.
        pages, same_bits: from ``describe_...``.
    """

    selection: Decision
    answer: str
    faults: tuple[str, ...]
    because: str | None
    lane: str | None
    call: str
    rows: tuple[Row, ...]
    pages: str | None
    same_bits: str | None


def explanation(selection: Decision) -> Explanation:
    """Returns the explanation of a selection as data."""
    target = selection.target
    lane = selection.lane
    return Explanation(
        selection,
        answer=_answer(selection),
        faults=_faults(selection),
        because=None if selection.backend is None else _because(selection),
        lane=f"{lane[0]}: {'; '.join(lane[1])}" if lane is not None and lane[1] else None,
        call=f"attention in {target.framework} on {target.device}: {selection.spec}",
        rows=tuple(_row(selection, name) for name in _ordered(selection)),
        pages=describe_pages(selection.spec),
        same_bits=describe_same_bits(selection.spec, selection.backend, target.kind),
    )


def _ordered(selection: Decision) -> tuple[str, ...]:
    """Returns all backends: the requested ones, the candidates of automatic choice, best first, and the others."""
    return tuple(dict.fromkeys((*(selection.requested or ()), *selection.automatic, *backends.names())))


def worth_showing(facts: Explanation) -> tuple[list[Row], int]:
    """Returns the rows that help the caller, and the number of the others.

    These are the backends that can run the call, the requested ones, and the candidates of automatic choice that are
    one change away. If there is none, they are the candidates with the fewest reasons.
    """
    requested = facts.selection.requested or ()
    eligible = {*requested, *facts.selection.automatic}
    shown = [
        row
        for row in facts.rows
        if not row.reasons or row.backend in requested or (row.verdict == ONE_CHANGE and row.backend in eligible)
    ]
    if not shown:
        closest = sorted(facts.rows, key=lambda row: (row.backend not in eligible, len(row.reasons)))[:MOST_CLOSEST]
        shown = [row for row in facts.rows if row in closest]
    return shown, len(facts.rows) - len(shown)


def sections(facts: Explanation, shown: list[Row]) -> dict[str, list[Row]]:
    """Returns rows by what their backends have in common, as title -> rows.

    The answer and the faults say everything about the chosen backend, or the requested ones if none was chosen.
    """
    chosen, requested = facts.selection.backend, facts.selection.requested or ()
    title = "can run it too"
    if chosen is None:
        title = "can run it, but a backend requested by name never falls back" if requested else "can run it"
    refused = [row for row in shown if row.reasons]
    others = [row for row in refused if row.backend not in requested]
    titled = {
        title: [row for row in shown if row.verdict in (ABLE, BY_NAME)],
        "requested, but refused": [row for row in refused if row not in others and chosen is not None],
        ONE_CHANGE: [row for row in others if row.verdict == ONE_CHANGE],
        REFUSED: [row for row in others if row.verdict == REFUSED],
    }
    return {title: rows for title, rows in titled.items() if rows}


def by_name(rows: list[Row]) -> list[str]:
    """Returns lines of the backends that run only when requested by name, those that this project never ran apart."""
    marks = dict.fromkeys(row.never_run for row in rows if row.verdict == BY_NAME)
    named = {mark: [row.backend for row in rows if (row.verdict, row.never_run) == (BY_NAME, mark)] for mark in marks}
    return [f"{BY_NAME}{f', {mark}' if mark else ''}: {', '.join(names)}" for mark, names in named.items()]


def _answer(selection: Decision) -> str:
    if selection.backend is not None:
        time = selection.predicted.get(selection.backend)
        lane = f", {selection.lane[0]} lane" if selection.lane is not None else ""
        return f"selected: {selection.backend}{lane}" + ("" if time is None else f", about {duration(time)}")
    if not selection.requested:
        able = any(not selection.reasons(name) for name in backends.names())
        return "no backend can run this call" + (" unless it is requested by name" if able else "")
    return f"backend={', '.join(selection.requested)!r} cannot run this call:"


def _faults(selection: Decision) -> tuple[str, ...]:
    if selection.backend is not None or not selection.requested:
        return ()
    names = dict.fromkeys(selection.requested)
    return tuple(
        ("" if len(names) == 1 else f"{name}: ") + with_remedy(reason)
        for name in names
        for reason in selection.reasons(name)
    )


def _because(selection: Decision) -> str:
    if selection.requested is not None:
        names = ", ".join(selection.requested)
        why = "requested by name" if len(selection.requested) == 1 else f"the first of {names} that can run the call"
        mark = selection.target.claims(selection.backend or "")[0].never_run
        return why if mark is None else f"{why}; {mark}"
    if selection.parts is not None:
        return "kernels that have no key ranges compute these in parts"
    if selection.source is None or selection.spec.invariant is not None:
        return "the first in the usual order that can run the call" if selection.spec.invariant is None else BECAUSE
    return f"the first that can run the call in the order of predicted times, from {selection.source}"


def _row(selection: Decision, name: str) -> Row:
    if reasons := selection.reasons(name):
        return Row(name, ONE_CHANGE if _one_change(selection, name) else REFUSED, None, reasons)
    verdict = ABLE if name in selection.automatic else BY_NAME
    mark = selection.target.claims(name)[0].never_run
    return Row(name, SELECTED if name == selection.backend else verdict, selection.predicted.get(name), (), mark)


def _one_change(selection: Decision, name: str) -> bool:
    """Returns whether one installation or one other argument would let a backend run the call."""
    spec, target = selection.spec, selection.target
    backend = backends.load(name, target.kind)
    if target.out_of_reach(name) is not None:
        return False
    if not target.claims(name)[0].runs_on(target.device) or (backend.PAGES_ALONE and not spec.paged):
        return False
    # A reason starts with the argument: two reasons against one argument still ask for one change. The device is none.
    changes = {reason.partition(":")[0] for reason in selection.reasons(name)}
    return len(changes) == 1 and f"device {target.device}" not in changes


def with_remedy(reason: str) -> str:
    """Returns a reason, with the command that installs the package if a missing package is the reason."""
    missing = MISSING.fullmatch(reason)
    if missing is None:
        return reason
    package = missing["package"]
    required = EXTRAS.get(package, missing["requirement"])
    return f"{missing['fault']}; pip install '{required}'{PIP_OPTIONS.get(package, '')}"


def duration(microseconds: float) -> str:
    """Returns a time as text, such as "37.5 µs" or "1.25 ms"."""
    return f"{microseconds:.3g} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.3g} ms"
