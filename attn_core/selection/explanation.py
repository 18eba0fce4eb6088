"""The explanation of a Selection, first as data and then as text of 80 columns: the answer, then what is worth knowing.

Nothing here runs on the way to a kernel: a Selection is explained when somebody reads its text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from attn_core import backends

if TYPE_CHECKING:
    from attn_core.selection.choice import Selection

COLUMNS = 80
"""The width of a terminal that nobody has made wider."""

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


COMMAND = re.compile(r"pip install '[^']*'( --[a-z-]+)*")
NO_BREAK = "\N{NO-BREAK SPACE}"


class Row(NamedTuple):
    """What an explanation says about one backend.

    Attributes:
        backend: its name.
        verdict: SELECTED, ABLE, BY_NAME, ONE_CHANGE or REFUSED.
        microseconds: the predicted time; None if it is unknown or the backend cannot run the call.
        reasons: why it cannot run the call; empty if it can.
    """

    backend: str
    verdict: str
    microseconds: float | None
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """All reasons as text, each with the command that lifts it if there is one."""
        return "; ".join(with_remedy(reason) for reason in self.reasons)


class Explanation(NamedTuple):
    """An explanation as data, which text and tables show.

    Attributes:
        answer: which backend runs the call, or that none does.
        faults: why each requested backend cannot run the call, if none can.
        because: why this backend was chosen; None if none was.
        lane: how JAX reaches the backend, if that has reasons.
        call: where the call would run, and its spec.
        rows: every backend: the requested ones, the candidates of automatic choice, best first, and the others.
    """

    answer: str
    faults: tuple[str, ...]
    because: str | None
    lane: str | None
    call: str
    rows: tuple[Row, ...]


def explanation(selection: Selection) -> Explanation:
    """Returns the explanation of a selection as data."""
    target = selection.target
    lane = selection.lane
    return Explanation(
        answer=_answer(selection),
        faults=_faults(selection),
        because=None if selection.backend is None else _because(selection),
        lane=f"{lane[0]}: {'; '.join(lane[1])}" if lane is not None and lane[1] else None,
        call=f"attention in {target.framework} on {target.device}: {selection.spec}",
        rows=tuple(_row(selection, name) for name in _ordered(selection)),
    )


def _ordered(selection: Selection) -> tuple[str, ...]:
    """Returns all backends: the requested ones, the candidates of automatic choice, best first, and the others."""
    return tuple(dict.fromkeys((*(selection.requested or ()), *selection.automatic, *backends.names())))


def worth_showing(selection: Selection, rows: Iterable[Row]) -> tuple[list[Row], int]:
    """Returns the rows that help the caller, and the number of the others.

    These are the backends that can run the call, the requested ones, and the candidates of automatic choice that are
    one change away. If there is none, they are the candidates with the fewest reasons.
    """
    rows = list(rows)
    requested = selection.requested or ()
    wanted = {*requested, *selection.automatic}
    shown = [
        row
        for row in rows
        if not row.reasons or row.backend in requested or (row.verdict == ONE_CHANGE and row.backend in wanted)
    ]
    if not shown:
        closest = sorted(rows, key=lambda row: (row.backend not in wanted, len(row.reasons)))[:MOST_CLOSEST]
        shown = [row for row in rows if row in closest]
    return shown, len(rows) - len(shown)


def others(selection: Selection, hidden: int, how: str) -> str:
    """Returns the line on the backends that are not shown.

    Args:
        how: what shows them.
    """
    noun = "other" if hidden == 1 else "others"
    return f"{hidden} {noun} cannot run it on {selection.target.device}; every reason: {how}"


def text(selection: Selection, everything: bool = False) -> str:
    """Returns the explanation as lines of at most 80 columns; see ``Selection.text``."""
    facts = explanation(selection)
    # Each fault has a line of its own, so that most are not broken.
    lines = [wrapped(facts.answer, "", "  "), *(wrapped(fault, "  ", "    ") for fault in facts.faults)]
    # The call is broken between its fields.
    call = ", ".join(field.replace(" ", NO_BREAK) for field in facts.call.split(", "))
    labelled = {"because": facts.because, "lane": facts.lane, "call": call}
    lines += [wrapped(f"{label}: {fact}", "  ", "    ") for label, fact in labelled.items() if fact is not None]
    if everything:
        return "\n".join([*lines, *_listed((row.backend, _sentence(row)) for row in facts.rows)])
    shown, hidden = worth_showing(selection, facts.rows)
    for title, rows in _sections(selection, shown).items():
        by_name = ", ".join(row.backend for row in rows if row.verdict == BY_NAME)
        lines.append(wrapped(title + ":", "", "  "))
        lines += _listed((row.backend, _detail(row)) for row in rows if row.verdict != BY_NAME)
        lines += [wrapped(f"{BY_NAME}: {by_name}", "  ", "    ")] if by_name else []
    if hidden:
        lines.append(wrapped(others(selection, hidden, "selection.text(everything=True)"), "", "  "))
    return "\n".join(lines)


def _sections(selection: Selection, shown: list[Row]) -> dict[str, list[Row]]:
    able = [row for row in shown if row.verdict in (ABLE, BY_NAME)]
    title = "can run it too"
    if selection.backend is None:
        title = "can run it, but a backend requested by name never falls back" if selection.requested else "can run it"
    requested = selection.requested or ()
    refused = [row for row in shown if row.reasons and row.backend not in requested]
    sections = {
        title: able,
        # If none of them was chosen, their reasons are already above.
        "requested, but refused": [
            row for row in shown if row.reasons and row.backend in requested and selection.backend is not None
        ],
        ONE_CHANGE: [row for row in refused if row.verdict == ONE_CHANGE],
        REFUSED: [row for row in refused if row.verdict == REFUSED],
    }
    return {title: rows for title, rows in sections.items() if rows}


def _answer(selection: Selection) -> str:
    if selection.backend is not None:
        time = selection.predicted.get(selection.backend)
        lane = f", {selection.lane[0]} lane" if selection.lane is not None else ""
        return f"selected: {selection.backend}{lane}" + ("" if time is None else f", about {duration(time)}")
    if not selection.requested:
        return "no backend can run this call"
    return f"backend={', '.join(selection.requested)!r} cannot run this call:"


def _faults(selection: Selection) -> tuple[str, ...]:
    if selection.backend is not None or not selection.requested:
        return ()
    names = dict.fromkeys(selection.requested)
    return tuple(
        ("" if len(names) == 1 else f"{name}: ") + with_remedy(reason)
        for name in names
        for reason in selection.reasons(name)
    )


def _because(selection: Selection) -> str:
    if selection.requested is not None:
        names = ", ".join(selection.requested)
        return "requested by name" if len(selection.requested) == 1 else f"the first of {names} that can run the call"
    if selection.source is None:
        return "the first in the usual order that can run the call"
    return f"the first that can run the call in the order of predicted times, from {selection.source}"


def _row(selection: Selection, name: str) -> Row:
    reasons = selection.reasons(name)
    if reasons:
        return Row(name, ONE_CHANGE if _one_change(selection, name) else REFUSED, None, reasons)
    verdict = ABLE if name in selection.automatic else BY_NAME
    return Row(name, SELECTED if name == selection.backend else verdict, selection.predicted.get(name), ())


def _one_change(selection: Selection, name: str) -> bool:
    """Returns whether one installation or one other argument would let a backend run the call."""
    spec, target = selection.spec, selection.target
    backend = backends.load(name, target.kind)
    if backend.FRAMEWORK == "jax" and target.framework == "torch":
        return False
    if not target.claims(name)[0].runs_on(target.device) or (backends.reads_pages_alone(backend) and not spec.paged):
        return False
    # A reason starts with the argument: two reasons against one argument still ask for one change.
    return len({reason.partition(":")[0] for reason in selection.reasons(name)}) == 1


def with_remedy(reason: str) -> str:
    """Returns a reason, with the command that installs the package if a missing package is the reason."""
    missing = MISSING.fullmatch(reason)
    if missing is None:
        return reason
    package = missing["package"]
    wanted = EXTRAS.get(package, missing["requirement"])
    return f"{missing['fault']}; pip install '{wanted}'{PIP_OPTIONS.get(package, '')}"


def duration(microseconds: float) -> str:
    """Returns a time as text, such as "37.5 µs" or "1.25 ms"."""
    return f"{microseconds:.3g} µs" if microseconds < 1e3 else f"{microseconds / 1e3:.3g} ms"


def _detail(row: Row) -> str:
    if row.reasons:
        return row.why
    return "" if row.microseconds is None else f"about {duration(row.microseconds)}"


def _sentence(row: Row) -> str:
    if row.reasons:
        return f"refused: {'; '.join(row.reasons)}"
    verdict = "can run it when requested by name" if row.verdict == BY_NAME else row.verdict
    return ", ".join(part for part in (verdict, _detail(row)) if part)


def _listed(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each pair, the second parts in one column."""
    pairs = list(pairs)
    width = max((len(name) for name, _ in pairs), default=0)
    return [wrapped(f"{name:<{width}}  {detail}".rstrip(), "  ", " " * (width + 4)) for name, detail in pairs]


def wrapped(line: str, indent: str = "", hanging: str = "") -> str:
    """Returns a line broken at spaces to 80 columns. Commands, and words such as a path, stay whole for copying."""
    whole = COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK), line)
    lines = fill(
        whole,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(NO_BREAK, " ")
