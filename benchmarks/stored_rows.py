"""Adds measured rows to a stored result of the same machine and the same packages.

A result is ``{"environment": ..., "device": ..., "calls": [row, ...]}``. A row of a later day has its own "date".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def continued(path: Path, result: dict[str, Any]) -> dict[str, Any]:
    """Returns the result that a file stores, to which rows of this run may be added.

    Args:
        path: of the file.
        result: of this run, so far without rows.

    Raises:
        SystemExit: names what differs if the file is of another device, processor, Python or package version. Its rows
            beside new ones would be compared as if they were equal.
    """
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before, now = ({"device": each["device"], **_flat(each["environment"])} for each in (stored, result))
    changed = [f"{name} {before.get(name)}, here {now.get(name)}" for name in now if before.get(name) != now[name]]
    if changed:
        raise SystemExit(f"{path}: measured with other things, so measure it whole: {'; '.join(changed)}")
    return stored


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    """Returns the versions, Python and the machine by name, without the date."""
    return {name: value for name, value in environment.items() if name not in ("date", "versions")} | environment[
        "versions"
    ]


def put(result: dict[str, Any], row: dict[str, Any], date: str) -> None:
    """Adds a row to a result, in the place of an older row of the same call.

    Args:
        result: changes in place.
        row: of one call: "call", "what" if the script measures several directions, and its times.
        date: of this run, as ``measure.environment`` writes it.
    """
    if date != result["environment"]["date"]:
        row = {**row, "date": date}
    places = [at for at, old in enumerate(result["calls"]) if key(old) == key(row)]
    if places:
        result["calls"][places[0]] = row
    else:
        result["calls"].append(row)


def key(row: dict[str, Any]) -> tuple[str, str]:
    """Returns what a row measures: the name of the call and the direction."""
    return row["call"], row.get("what", "")


def dates(result: dict[str, Any]) -> str:
    """Returns the days on which a result was measured, the first one first, and which rows are of later days."""
    first = str(result["environment"]["date"])
    later: dict[str, list[str]] = {}
    for row in result["calls"]:
        if "date" in row:
            later.setdefault(row["date"], []).append(" ".join(filter(None, key(row))))
    if "layer_date" in result:
        later.setdefault(result["layer_date"], []).append("the layer")
    return "; ".join([first, *(f"on {date}: {', '.join(names)}" for date, names in sorted(later.items()))])
