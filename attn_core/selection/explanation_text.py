"""The explanation of a Selection as text of 80 columns: the answer first, then what is worth knowing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from textwrap import fill

from attn_core.selection.explanation import BY_NAME, Explanation, Row, by_name, duration, sections, worth_showing

COLUMNS = 80
"""The usual width of a terminal."""

COMMAND = re.compile(r"pip install '[^']*'( --[a-z-]+)*")
NO_BREAK = "\N{NO-BREAK SPACE}"


def text(facts: Explanation, everything: bool = False, how: str = "selection.text(everything=True)") -> str:
    """Returns the explanation as lines of at most 80 columns; see ``Selection.text``. how: what shows everything."""
    lines = _head(facts, everything)
    if everything:
        return "\n".join([*lines, *_listed((row.backend, _sentence(row)) for row in facts.rows)])
    shown, hidden = worth_showing(facts)
    for title, rows in sections(facts, shown).items():
        lines.append(wrapped(title + ":", "", "  "))
        lines += _listed((row.backend, _detail(row)) for row in rows if row.verdict != BY_NAME)
        lines += [wrapped(line, "  ", "    ") for line in by_name(rows)]
    if hidden:
        noun = "other" if hidden == 1 else "others"
        lines.append(
            wrapped(f"{hidden} {noun} cannot run it on {facts.selection.target.device}; every reason: {how}", "", "  ")
        )
    return "\n".join(lines)


def _head(facts: Explanation, everything: bool) -> list[str]:
    """Returns the lines before the list of backends, the answer first; ``everything`` as in ``text``."""
    # Each fault has a line of its own, so that most are not broken.
    lines = [wrapped(facts.answer, "", "  "), *(wrapped(fault, "  ", "    ") for fault in facts.faults)]
    # The call is broken between its fields.
    call = ", ".join(field.replace(" ", NO_BREAK) for field in facts.call.split(", "))
    selection = facts.selection
    labelled = {"because": facts.because, "parts": selection.parts, "lane": facts.lane, "mask": selection.mask}
    labelled |= {"pages": facts.pages, "same bits": facts.same_bits}
    forward_mode = selection.forward_mode if everything else None
    labelled |= {"max_logit": selection.max_logit, "forward mode": forward_mode, "call": call}
    return lines + [wrapped(f"{label}: {fact}", "  ", "    ") for label, fact in labelled.items() if fact is not None]


def _detail(row: Row) -> str:
    if row.reasons:
        return row.why
    return "" if row.microseconds is None else f"about {duration(row.microseconds)}"


def _sentence(row: Row) -> str:
    if row.reasons:
        return f"refused: {'; '.join(row.reasons)}"
    verdict = "can run it when requested by name" if row.verdict == BY_NAME else row.verdict
    return ", ".join(part for part in (verdict, _detail(row), row.never_run) if part)


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
