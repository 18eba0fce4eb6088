"""Finds programs that run a call by callback again and again, although its backend has kernels that XLA can launch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from attn_core.call import counters
from attn_core.call.log import Place, place
from attn_core.call.slow_paths import warn_once
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep

HOT_RUNS = 100
"""The run of one call at which it counts as a loop."""

_places: dict[BridgedCall, Place] = {}
"""The line at which each call was traced first; XLA runs the callback on a thread that does not know it. Only calls
that miss the compiled lane by a few reasons are here."""


def traced(call: BridgedCall | BridgedStep) -> None:
    """Counts a call that is traced for the callback lane, and remembers its line if ``counted`` may warn of it."""
    counters.count("callback")
    if isinstance(call, BridgedCall) and compiled_lane.missing(call) is not None:
        line = place()
        if line is not None:
            _places.setdefault(call, line)


def counted(run_call: Callable[[Any], None], call: BridgedCall) -> Callable[[Any], None]:
    """Returns the function, which warns at its HOT_RUNS-th run if only some reasons keep it from the compiled lane."""
    missing = compiled_lane.missing(call)
    if missing is None:
        return run_call
    runs = count(1).__next__

    def run(values: Any) -> None:
        if runs() == HOT_RUNS:
            finding = f"{call.backend} {call.direction} ran {HOT_RUNS} times by callback, because {missing}"
            remedy = "change that argument so that XLA launches the kernel, or compare backends with `attn bench`"
            warn_once("callback", _places.get(call), finding, remedy)
        run_call(values)

    return run
