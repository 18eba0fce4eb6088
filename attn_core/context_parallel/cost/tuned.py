"""The figures in force: a file that ``attn tune --ranks`` wrote on this machine, else the package's figures."""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from attn_core.context_parallel.cost.machine import OPTIONAL, Constants
from attn_core.selection import Target
from attn_core.selection.tables import device_name, user_folder, versions
from attn_core.selection.whole_file import read_json

FORMAT = 1
"""Of the files. A file in another format is not read."""


def tuned_path(device: str) -> Path:
    """Returns where ``attn tune --ranks`` writes the figures of a device such as "sm90" or "cpu"."""
    return user_folder() / f"ranks-{device}.json"


@cache  # so that a process keeps its choice of strategies whatever happens to the file
def constants_in_force(device: str) -> Constants:
    """Returns the figures that decide for a device: the user's file if there is one, else ``Constants.of``.

    A file that cannot be read, or was measured on another device or with other versions, is ignored with one warning.
    """
    path: Path | None = None
    try:
        path = tuned_path(device)
        if not path.is_file():
            return Constants.of(device)
        raw = read_json(path)
        reason = _stale(raw, device)
        if reason is None:
            return tuned_constants(raw)
    except Exception as error:  # a damaged file may fail in any way, and must not stop attention
        reason = f"it is not a file of attn tune --ranks ({type(error).__name__}: {error})"
    if path is None:  # a process without a home folder has no file
        return Constants.of(device)
    warnings.warn(f"{path}: ignored, because {reason}; run `attn tune --ranks`, or delete the file", stacklevel=2)
    return Constants.of(device)


def constants_for(target: Target) -> Constants:
    """Returns the figures that decide for a framework on a device. XLA launches a JAX program itself."""
    constants = constants_in_force(target.device)
    return constants.without_host() if target.framework == "jax" else constants


def tuned_constants(raw: dict[str, Any]) -> Constants:
    """Returns the figures of a file's content; their name says that they were measured, where and when.

    Raises:
        KeyError, TypeError, ValueError, SpecError: if the content is not that of a file of ``attn tune --ranks``.
    """
    package = asdict(Constants.of(str(raw["device"])))
    # A measurement of ranks has no rates of its own for some of these, and the package's are nearer than none.
    raw = {**{name: package[name] for name in OPTIONAL}, **raw}
    numbers = [value for value in raw.values() if isinstance(value, float | int) and not isinstance(value, bool)]
    numbers += [number for name in OPTIONAL if isinstance(raw[name], list | tuple) for number in raw[name]]
    numbers += [number for rows in raw["links"].values() for row in rows for number in row]
    # json reads NaN and 1e999. A rate of 0 would divide by it, and no overlap at all is 0.
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("expected finite numbers of 0 or more")
    for name in ("forward_tflops", "backward_tflops", "memory_gib_s", "network_gib_s", "ranks_per_host"):
        if not raw[name] > 0:
            raise ValueError(f"{name}={raw[name]}: expected more than 0")
    if not all(row[0] > 0 and row[1] > 0 for rows in raw["links"].values() for row in rows):
        raise ValueError("links: expected sizes and rates above 0")
    name = f"{raw['device_name']}, {raw['ranks']} ranks, as attn tune measured them on {raw['date']}"
    return Constants.from_table({**raw, "device_name": name})


def _stale(raw: dict[str, Any], device: str) -> str | None:
    """Returns why a file does not describe this installation, or None."""
    if raw["format"] != FORMAT:
        return f"its format is {raw['format']}, not {FORMAT}"
    if (name := device_name(device)) is not None and name != raw["device_name"]:
        return f"it was measured on {raw['device_name']}, and this is {name}"
    now = versions()["torch"]
    if raw["versions"].get("torch") != now:
        return f"it was measured with torch {raw['versions'].get('torch')}, and {now} is installed"
    return None
