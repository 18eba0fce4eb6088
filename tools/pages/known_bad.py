"""Writes docs/reference/known_bad.md and docs/lab/watched_reports.md; imports no kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from attn_core.backends.shared import known_bad
from attn_core.backends.shared.known_bad import EVERY_CALL, QUANTITIES, Condition, Row

WATCHED = Path(__file__).with_name("watched.json")


class Watched(NamedTuple):
    """A report about a package that our backends use.

    Attributes:
        link: to the thread.
        package: the package that has the fault.
        versions: as the thread gives them; empty if it gives none.
        reported: the day, the month or the year of the report.
        symptom: what goes wrong, in one sentence.
        affected: whether our calls are: "yes", "no" or "not tested".
        because: why we think so.
        state: of the thread when it was read.
        seen: the day on which it was read.
    """

    link: str
    package: str
    versions: str
    reported: str
    symptom: str
    affected: str
    because: str
    state: str
    seen: str


HEAD = """# Known-bad kernels

Versions of upstream packages that compute something wrong. `make support` writes this page from
`attn_core/backends/shared/known_bad.json`. [Watched reports](../lab/watched_reports.md) has faults that our calls
avoid.

Such a kernel runs neither automatically nor by name: the error and `explain` quote the row, with its link. `attn
doctor` lists the rows that concern a machine. A test shows each fault on the kernel itself, and fails once upstream has
mended it.
"""

WATCH = """# Watched reports

`make support` writes this page from `attn_core/backends/shared/known_bad.json` and `tools/pages/watched.json`.
[Known-bad kernels](../reference/known_bad.md) has the kernels that are refused.

## Avoided

These faults cannot happen to a call of attn-core; the row says why.
"""

REPORTS = """
## Reports

Reports of faults that could make attention wrong, stop it, or reach outside its buffers, and whether our calls are
affected. They were read in an archive of threads that ends in September 2026, so their state may have changed since.
"""


def watched() -> tuple[Watched, ...]:
    """Returns the rows of the watch list."""
    return tuple(Watched(**row) for row in json.loads(WATCHED.read_text(encoding="utf-8")))


def render() -> str:
    """Returns the page of known-bad kernels as Markdown."""
    refused = map(_refused, _of("refused"))
    words = ((f"`{word}`", quantity.meaning) for word, quantity in QUANTITIES.items())
    return "\n".join(
        [
            HEAD,
            "## Refused\n",
            *_table(("backends", "faulty", "calls", "symptom", "found"), refused),
            "\n## Words of the conditions\n",
            *_table(("word", "meaning"), words),
            "",
        ]
    )


def render_watched() -> str:
    """Returns the page of watched reports as Markdown."""
    avoided = map(_avoided, _of("avoided"))
    return "\n".join(
        [
            WATCH,
            *_table(("backends", "faulty", "fault", "how our calls avoid it", "found"), avoided),
            REPORTS,
            *_table(("report", "symptom", "affected", "state"), map(_watched, watched())),
            "",
        ]
    )


def _of(handling: str) -> list[Row]:
    return [row for row in known_bad.rows() if row.handling == handling]


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [" | ".join(titles), " | ".join("---" for _ in titles), *(" | ".join(row) for row in rows)]
    return [f"| {line} |" for line in lines]


def _refused(row: Row) -> tuple[str, ...]:
    calls = " and ".join(map(_spoken, row.conditions)) or EVERY_CALL
    backward = "gradients; " if row.direction == "backward" else ""
    return _names(row.backends), _faulty(row), backward + calls, row.symptom, _found(row)


def _avoided(row: Row) -> tuple[str, ...]:
    return _names(row.backends), _faulty(row), row.symptom, row.how, _found(row)


def _spoken(condition: Condition) -> str:
    words = {True: "yes", False: "no"}
    value = condition.value
    return f"{condition.quantity} {condition.relation} {words[value] if isinstance(value, bool) else value}"


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _faulty(row: Row) -> str:
    versions = f"{row.package} {row.versions}".replace(",", ", ") if row.versions else f"{row.package}, all versions"
    return f"{versions}; {', '.join(row.devices)}"


def _found(row: Row) -> str:
    return f"{row.found}, [{_thread(row.link)}]({row.link}), `{row.name}`"


def _thread(link: str) -> str:
    """Returns "pytorch#162588" for the address of a thread, and "source" for one of code."""
    parts = link.split("/")
    return f"{parts[-3]}#{parts[-1]}" if parts[-2] in ("issues", "pull") else "source"


def _watched(row: Watched) -> tuple[str, ...]:
    package = f"{row.package} {row.versions}" if row.versions else row.package
    report = f"[{_thread(row.link)}]({row.link}), {row.reported}: {package}"
    return report, row.symptom, f"{row.affected}: {row.because}", f"{row.state}, read {row.seen}"
