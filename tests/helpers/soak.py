"""Runs ever-changing attention calls, and reads what they leave behind: memory, descriptors, threads, handlers, caches.

The time of a call is compared with a fixed piece of work that runs beside it, so a machine that becomes slower cancels.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from tempfile import TemporaryFile
from typing import Any

import caches
from soak_calls import EagerCalls
from soak_samples import sample

POINTS = 200
"""Readings in a run."""
WARM_UP = 0.05
"""The share of a run before its first reading. Caches fill and programs compile in it."""


class Budget:
    """How far a run is, by calls or by time, from 0 to 1."""

    def __init__(self, calls: int | None, seconds: float | None) -> None:
        self.calls, self.seconds, self.began = calls, seconds, time.perf_counter()
        self.done = self.blocks = 0

    def share(self) -> float:
        if self.calls is not None:
            return self.done / self.calls
        assert self.seconds is not None
        return (time.perf_counter() - self.began) / self.seconds


def soak(calls: EagerCalls, budget: Budget, points: int = POINTS) -> dict[str, Any]:
    """Runs blocks of calls until the budget is spent, and returns the points with the run's totals.

    A point has a ``sample`` and the times of the blocks before it: seconds per call divided by seconds of a
    calibration. Blocks are alike, so the median of these ratios is a property of the code and not of the draw.
    ``settled`` points were read after the framework dropped its own caches; their memory can be compared.
    """
    gc.collect()
    gc.freeze()  # what imports have made is not scanned again in every reading
    while budget.share() < WARM_UP:
        _block(calls, budget)
    began, warm, read = time.perf_counter(), budget.done, 0
    blocks: list[tuple[float, float]] = []
    # A file, because what is read must not be part of the memory that is read.
    with TemporaryFile("w+", encoding="utf-8") as file:
        while budget.share() < 1:
            blocks.append(_block(calls, budget))
            if budget.share() >= WARM_UP + (1 - WARM_UP) * (read + 1) / points:
                seconds = time.perf_counter() - began
                ratio = statistics.median(ours / fixed for ours, fixed in blocks)
                ours, fixed = (statistics.median(times) for times in zip(*blocks))
                point = {"calls": budget.done, "seconds": seconds, "ratio": ratio, "call": ours, "calibration": fixed}
                blocks.clear()
                point |= {"programs": calls.programs, "settled": calls.settle(read)} | sample()
                # The sizes of all caches in every tenth reading, because they fill most of the file.
                if read % (points // 10 or 1) and not caches.over_bound(point["caches"]):
                    del point["caches"]
                file.write(json.dumps(point) + "\n")
                read += 1
        gc.unfreeze()
        file.seek(0)
        stored = [json.loads(line) for line in file]
    return {"calls": budget.done, "warm-up": warm, "seconds": time.perf_counter() - budget.began, "points": stored}


def _block(calls: EagerCalls, budget: Budget) -> tuple[float, float]:
    """Runs one block; returns its seconds per call, and the seconds of a calibration."""
    untimed = calls.begin(budget.blocks)
    began = time.perf_counter()
    for kind in calls.block:
        calls.run(kind)
    calls.wait()
    middle = time.perf_counter()
    calls.calibrate()
    calls.wait()
    ended = time.perf_counter()
    budget.done += len(calls.block) + untimed
    budget.blocks += 1
    return (middle - began) / len(calls.block), ended - middle
