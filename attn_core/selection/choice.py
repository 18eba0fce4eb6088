"""select: chooses the backend of a call; explain: gives every reason for the choice.

The choice stops at the first backend that can run the call. A Selection computes the reasons against the others only
when they are read, so that the first call of a new shape does not pay for an explanation. Choice and explanation use
the same function, ``reasons_of``, so they cannot disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from textwrap import fill
from typing import NamedTuple

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.call.after_fork import lazy_property
from attn_core.call.grouped_rows import GroupedRows
from attn_core.call.kinds import check_kind
from attn_core.call.masks import recognised
from attn_core.call.options import requested_names
from attn_core.call.spec import AttentionSpec, describe_pages
from attn_core.expressions.tree import Expression
from attn_core.selection import forward_mode, preference
from attn_core.selection.tables import Figures
from attn_core.selection.target import (
    Reasons,
    Target,
    backend_on,
    broken_rules,
    reasons_of,
    refusals,
    unclaimed,
    unclaimed_gradient,
)

COLUMNS = 80
"""The usual width of a terminal. Texts of selections and commands have lines of at most so many columns."""
COMMAND = re.compile(r"pip install '[^']*'( --[a-z-]+)*")
NO_BREAK = "\N{NO-BREAK SPACE}"


def lane_of(name: str, spec: AttentionSpec, target: Target, program_faults: Reasons = ()) -> tuple[str, Reasons] | None:
    """Returns how JAX reaches a backend; see ``Selection.lane``."""
    if target.framework != "jax":
        return None
    backend = backends.load(name, target.kind)
    if backend.framework != "torch":
        return None
    why = backend.program_refuses(spec, target.device)
    if why == () and not program_faults:
        return "compiled", ()
    return "callback", (*(why or ()), *program_faults)


@dataclass(frozen=True)
class Selection:
    """The choice of a backend with all reasons. Errors, logs and docs all show ``str(selection)``: its ``text()``.

    Attributes:
        spec, target: the request.
        requested: the backends the caller named, or None for automatic choice.
        backend: the chosen backend, or None.
        program_faults: why this installation cannot build the kernels that XLA would launch. Only an attempt shows it.
        mask: how much of the scores the call's mask leaves, if its values are on the host.
        mask_mod: what the call says in place of terms of its mask function; None if it says nothing.
        parts: how kernels without key ranges compute the call's in parts; None if one kernel computes them.
        max_logit: what computes the largest logits; None if the call does not return them.
    """

    spec: AttentionSpec
    target: Target
    requested: tuple[str, ...] | None
    backend: str | None
    program_faults: Reasons = ()
    mask: str | None = None
    mask_mod: str | None = None
    parts: str | None = None
    max_logit: str | None = None

    @lazy_property
    def considered(self) -> tuple[str, ...]:
        """All backends: the candidates in the order of preference, then the ones that run only when requested."""
        candidates = self.requested or self.automatic
        return (*candidates, *(name for name in backends.names() if name not in candidates))

    @lazy_property
    def refusals(self) -> tuple[tuple[str, Reasons], ...]:
        """``((backend, reasons), ...)``: every reason of every backend that cannot run the call."""
        reasons = ((name, refusals(name, self.spec, self.target)) for name in self.considered)
        chosen = None if self.parts is None else self.backend  # it runs other calls than this one
        return tuple((name, why) for name, why in reasons if why and name != chosen)

    @lazy_property
    def lane(self) -> tuple[str, Reasons] | None:
        """How JAX reaches the chosen torch backend; None for other frameworks and backends.

        ``("compiled", ())``: XLA launches its kernels. ``("callback", why)``: XLA calls Python, for the reasons
        ``why``.
        """
        if self.backend is None or self.parts is not None:
            return None
        return lane_of(self.backend, self.spec, self.target, self.program_faults)

    @lazy_property
    def predicted(self) -> dict[str, float]:
        """The predicted microseconds of each backend that has a cost model, whether or not it can run the call."""
        if self.parts is not None:
            return {}
        return preference.predicted(self.spec, self.target.framework, self.target.device)

    @lazy_property
    def forward_mode(self) -> str:
        """The backend that computes the call's tangents in forward mode, or "none"; with the reasons against others."""
        return str(forward_mode.choose(self.spec, self.target, self.requested))

    @property
    def source(self) -> str | None:
        """What the predictions are derived from; None if the static order of ``attn_core.backends`` decides."""
        return preference.source(self.target.framework, self.target.device) if self.predicted else None

    @property
    def published(self) -> Figures | None:
        """The figures of others by which the chosen backend comes first; None if it was chosen for another reason."""
        if self.requested is not None or self.parts is not None or self.spec.invariant is not None:
            return None
        figures = preference.published(self.spec, self.target.framework, self.target.device)
        if figures is None or self.backend not in figures.first:
            return None
        usual = backends.usual_order(self.target.framework, self.target.kind)
        able = next(name for name in usual if name == self.backend or not self.reasons(name))
        return None if able == self.backend else figures

    def reasons(self, name: str) -> Reasons:
        """Returns why a backend cannot run the call; empty if it can."""
        return dict(self.refusals).get(name, ())

    def text(self, everything: bool = False) -> str:
        """Returns the explanation in lines of at most 80 columns.

        It says which backend runs the call and why, which others can, and which need one change: an installation or
        another argument.

        Args:
            everything: list every backend with every reason instead.
        """
        return text_of(self, everything)

    def __str__(self) -> str:
        return self.text()

    @lazy_property
    def automatic(self) -> tuple[str, ...]:
        """The candidates of automatic choice, best first. All other backends run only when requested by name."""
        return preference.candidates(self.spec, self.target)


class NoBackendError(NotImplementedError):
    """No backend, or no requested backend, can run the call. ``error.selection`` has every reason."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        super().__init__(selection)


def explain(spec: AttentionSpec, target: Target, backend: str | tuple[str, ...] | None = None) -> Selection:
    """Returns the Selection of a call, even if no backend can run it. Pure: the result depends on the arguments only.

    Raises:
        SpecError: for an unknown name, an empty tuple of names, or an argument of another type.
    """
    check_kind("spec", spec, AttentionSpec, "an AttentionSpec")
    check_kind("target", target, Target, "a Target, such as Target('torch', 'cpu')")
    return _explained(spec, target, requested_names(backend))


@from_records(maxsize=64)  # small, because the reasons of a call take 10 KiB once they are read
def _explained(spec: AttentionSpec, target: Target, requested: tuple[str, ...] | None) -> Selection:
    for name in requested or ():
        # A wrong name is an error even behind a name that can run the call.
        backends.check_name(name)
    candidates = requested or preference.candidates(spec, target)
    chosen = next((name for name in candidates if next(reasons_of(name, spec, target), None) is None), None)
    selection = Selection(spec, target, requested, chosen)
    if requested is None:
        vars(selection)["automatic"] = candidates  # so that nobody computes it again
    return selection


def with_function(selection: Selection, function: Expression | None) -> Selection:
    """Returns the explanation of a call that has a mask function, with what the spec says in place of its terms."""
    words = None if selection.mask_mod is not None else recognised(function, selection.spec)
    return selection if words is None else replace(selection, mask_mod=words)


def on_documents(rows: GroupedRows, target: Target, requested: tuple[str, ...] | None) -> Selection | None:
    """Returns the selection of a call on packed documents; None if only plain operations, or none, can run these."""
    selection = _explained(rows.spec, target, requested)
    if selection.backend in (None, backends.plain_backend(target.framework)):
        return None
    return replace(selection, mask_mod=rows.words)


def select(spec: AttentionSpec, target: Target, backend: str | tuple[str, ...] | None = None) -> Selection:
    """Chooses the backend of a call.

    Args:
        backend: None for automatic choice; a name, which runs or raises; or names in order of preference, of which the
            first that supports the call runs.

    Raises:
        NoBackendError: if none can run the call, with every reason.
        SpecError: for an unknown name.
    """
    selection = explain(spec, target, backend)
    if selection.backend is None:
        raise NoBackendError(selection)
    return selection


def choose(
    spec: AttentionSpec, target: Target, requested: tuple[str, ...] | None, claimed: dict[str, bool]
) -> tuple[str, tuple[str, ...]] | None:
    """Chooses for a call that differs from earlier ones in the batch and the lengths alone, as ``explain`` does.

    Args:
        requested: names that ``explain`` has accepted, or None.
        claimed: by backend, whether its claims cover these calls. One dict serves all calls that differ in the batch
            and the lengths alone, and for which q_len == kv_len is equally true. This function fills it.

    Returns:
        The chosen backend and all candidates, best first; None if no candidate can run the call.
    """
    candidates = requested or preference.candidates(spec, target)
    for name in candidates:
        backend, covered = backend_on(target, name), claimed.get(name)
        if covered is None:
            covered = not any(unclaimed(backend, spec, target))
            covered = covered and not (spec.needs_backward and any(unclaimed_gradient(backend, spec, target)))
            claimed[name] = covered
        if covered and not broken_rules(name, backend, spec, target):
            return name, candidates
    return None


# The explanation of a Selection: the answer, then what is worth knowing. Nothing below runs on the way to a kernel.

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
    """What an explanation says about one backend."""

    backend: str
    verdict: str  # SELECTED, ABLE, BY_NAME, ONE_CHANGE or REFUSED
    microseconds: float | None  # the predicted time; None if it is unknown or the backend cannot run the call
    reasons: Reasons  # why it cannot run the call; empty if it can
    never_run: str | None = None  # see ``Support.never_run``

    @property
    def detail(self) -> str:
        """All reasons, each with the command that lifts it if there is one; else the predicted time, if it is known."""
        if self.reasons:
            return "; ".join(with_remedy(reason) for reason in self.reasons)
        return "" if self.microseconds is None else f"about {duration(self.microseconds)}"

    @property
    def sentence(self) -> str:
        """The verdict with all reasons, or the predicted time."""
        if self.reasons:
            return f"refused: {'; '.join(self.reasons)}"
        verdict = "can run it when requested by name" if self.verdict == BY_NAME else self.verdict
        return ", ".join(part for part in (verdict, self.detail, self.never_run) if part)


def text_of(selection: Selection, everything: bool = False, how: str = "selection.text(everything=True)") -> str:
    """Returns the explanation as lines of at most 80 columns; see ``Selection.text``. how: what shows everything."""
    lines, rows = _head(selection, everything), _rows(selection)
    if everything:
        return "\n".join([*lines, *_listed({row.backend: row.sentence for row in rows})])
    shown = _worth_showing(selection, rows)
    for title, titled in _sections(selection, shown).items():
        lines.append(wrapped(title + ":", "", "  "))
        lines += _listed({row.backend: row.detail for row in titled if row.verdict != BY_NAME})
        # Those that this project never ran are listed apart.
        for mark in dict.fromkeys(row.never_run for row in titled if row.verdict == BY_NAME):
            names = [row.backend for row in titled if (row.verdict, row.never_run) == (BY_NAME, mark)]
            lines.append(wrapped(f"{BY_NAME}{f', {mark}' if mark else ''}: {', '.join(names)}", "  ", "    "))
    if hidden := len(rows) - len(shown):
        noun = "other" if hidden == 1 else "others"
        lines.append(
            wrapped(f"{hidden} {noun} cannot run it on {selection.target.device}; every reason: {how}", "", "  ")
        )
    return "\n".join(lines)


def _head(selection: Selection, everything: bool) -> list[str]:
    """Returns the lines before the list of backends, the answer first."""
    # Each fault has a line of its own, so that most are not broken.
    lines = [wrapped(_answer(selection), "", "  "), *(wrapped(fault, "  ", "    ") for fault in _faults(selection))]
    spec, target, lane = selection.spec, selection.target, selection.lane
    call = f"attention in {target.framework} on {target.device}: {spec}"
    labelled = {
        "because": None if selection.backend is None else _because(selection),
        "parts": selection.parts,
        "lane": f"{lane[0]}: {'; '.join(lane[1])}" if lane is not None and lane[1] else None,
        "mask": selection.mask,
        "mask_mod": selection.mask_mod,
        "pages": describe_pages(spec),
        "same bits": preference.describe_same_bits(spec, selection.backend, target.kind),
        "max_logit": selection.max_logit,
        "forward mode": selection.forward_mode if everything else None,
        # The call is broken between its fields.
        "call": ", ".join(field.replace(" ", NO_BREAK) for field in call.split(", ")),
    }
    return lines + [wrapped(f"{label}: {fact}", "  ", "    ") for label, fact in labelled.items() if fact is not None]


def _answer(selection: Selection) -> str:
    if selection.backend is not None:
        time = selection.predicted.get(selection.backend)
        lane = f", {selection.lane[0]} lane" if selection.lane is not None else ""
        return f"selected: {selection.backend}{lane}" + ("" if time is None else f", about {duration(time)}")
    if not selection.requested:
        able = any(not selection.reasons(name) for name in backends.names())
        return "no backend can run this call" + (" unless it is requested by name" if able else "")
    return f"backend={', '.join(selection.requested)!r} cannot run this call:"


def _faults(selection: Selection) -> list[str]:
    """Returns why each requested backend cannot run the call, if none can."""
    if selection.backend is not None or not selection.requested:
        return []
    names = dict.fromkeys(selection.requested)
    return [
        ("" if len(names) == 1 else f"{name}: ") + with_remedy(reason)
        for name in names
        for reason in selection.reasons(name)
    ]


def _because(selection: Selection) -> str:
    """Returns why the chosen backend is the choice."""
    if selection.requested is not None:
        names = ", ".join(selection.requested)
        why = "requested by name" if len(selection.requested) == 1 else f"the first of {names} that can run the call"
        mark = selection.target.claims(selection.backend or "")[0].never_run
        return why if mark is None else f"{why}; {mark}"
    if selection.parts is not None:
        return "kernels that have no key ranges compute these in parts"
    if selection.spec.invariant is not None:
        return preference.BECAUSE
    if (figures := selection.published) is not None:
        return f"the first that can run the call; {figures}"
    if selection.source is None:
        return "the first in the usual order that can run the call"
    return f"the first that can run the call in the order of predicted times, from {selection.source}"


def _rows(selection: Selection) -> list[Row]:
    """Returns a row for each backend: the requested ones, the candidates of automatic choice, then the others."""
    names = dict.fromkeys((*(selection.requested or ()), *selection.automatic, *backends.names()))
    return [_row(selection, name) for name in names]


def _row(selection: Selection, name: str) -> Row:
    if reasons := selection.reasons(name):
        return Row(name, ONE_CHANGE if _one_change(selection, name) else REFUSED, None, reasons)
    verdict = ABLE if name in selection.automatic else BY_NAME
    mark = selection.target.claims(name)[0].never_run
    return Row(name, SELECTED if name == selection.backend else verdict, selection.predicted.get(name), (), mark)


def _one_change(selection: Selection, name: str) -> bool:
    """Returns whether one installation or one other argument would let a backend run the call."""
    spec, target = selection.spec, selection.target
    backend = backends.load(name, target.kind)
    if target.out_of_reach(name) is not None:
        return False
    if not target.claims(name)[0].runs_on(target.device) or (backend.takes_pages_alone and not spec.paged):
        return False
    # A reason starts with the argument: two reasons against one argument still ask for one change. The device is none.
    changes = {reason.partition(":")[0] for reason in selection.reasons(name)}
    return len(changes) == 1 and not changes.pop().startswith(f"device {target.device}")


def _worth_showing(selection: Selection, rows: list[Row]) -> list[Row]:
    """Returns the rows that help the caller.

    These are the backends that can run the call, the requested ones, and the candidates of automatic choice that are
    one change away. If there is none, they are the candidates with the fewest reasons.
    """
    requested = selection.requested or ()
    eligible = {*requested, *selection.automatic}
    shown = [
        row
        for row in rows
        if not row.reasons or row.backend in requested or (row.verdict == ONE_CHANGE and row.backend in eligible)
    ]
    if not shown:
        closest = sorted(rows, key=lambda row: (row.backend not in eligible, len(row.reasons)))[:MOST_CLOSEST]
        shown = [row for row in rows if row in closest]
    return shown


def _sections(selection: Selection, shown: list[Row]) -> dict[str, list[Row]]:
    """Returns rows by what their backends have in common, as title -> rows.

    The answer and the faults say everything about the chosen backend, or the requested ones if none was chosen.
    """
    chosen, requested = selection.backend, selection.requested or ()
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


def _listed(details: dict[str, str]) -> list[str]:
    """Returns a line for each backend and its detail, the details in one column."""
    width = max(map(len, details), default=0)
    return [wrapped(f"{name:<{width}}  {detail}".rstrip(), "  ", " " * (width + 4)) for name, detail in details.items()]


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
