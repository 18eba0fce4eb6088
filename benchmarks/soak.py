"""Runs ever-changing attention calls for a long time, and judges what they leave behind: memory, descriptors, threads,
handlers, full caches, slower calls. Exit code 1 if anything grows.

python -m benchmarks.soak --mode eager --calls 1000000 --json soak-cpu-eager.json
python -m benchmarks.soak --mode jit --calls 200000 --json soak-cpu-jit.json
python -m benchmarks.soak --mode eager --device cuda --minutes 9.5 --json soak-h200-eager.json

Each run takes one process. On a CPU it runs on one thread. The time of a call is compared with a fixed piece of work
that runs beside it, so a machine that becomes slower cancels. ``benchmarks.soak_report`` renders the files.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol

from benchmarks import caches, soak_verdict
from benchmarks.measure import environment
from benchmarks.soak_samples import sample

POINTS = 200
"""Readings in a run."""
WARM_UP = 0.05
"""The share of a run before its first reading. Caches fill and programs compile in it."""


class Calls(Protocol):
    """What a mode runs: ``soak_calls.EagerCalls`` or ``soak_jit.JitCalls``."""

    block: list[str]
    programs: int

    def begin(self, number: int) -> int: ...
    def settle(self, reading: int) -> bool: ...
    def run(self, kind: str) -> Any: ...
    def calibrate(self) -> None: ...
    def wait(self) -> None: ...


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


def soak(
    calls: Calls, budget: Budget, on_point: Callable[[dict[str, Any]], None] = lambda _: None, points: int = POINTS
) -> dict[str, Any]:
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
                on_point(point)
                # The sizes of all caches in every tenth reading, because they fill most of the file.
                if read % (points // 10 or 1) and not caches.over_bound(point["caches"]):
                    del point["caches"]
                file.write(json.dumps(point) + "\n")
                read += 1
        gc.unfreeze()
        file.seek(0)
        stored = [json.loads(line) for line in file]
    return {"calls": budget.done, "warm-up": warm, "seconds": time.perf_counter() - budget.began, "points": stored}


def _block(calls: Calls, budget: Budget) -> tuple[float, float]:
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


def calls_of(mode: str, device: str, seed: int, **more: Any) -> Calls:
    """Returns the calls of a mode; ``more`` as in its class."""
    if mode == "eager":
        from benchmarks.soak_calls import EagerCalls

        return EagerCalls(device, seed, **more)
    from benchmarks.soak_jit import JitCalls

    return JitCalls(device, seed, **more)


def device_name(device: str) -> str:
    """Returns the name of the GPU, or of the processor."""
    if device == "cpu":
        return str(environment()["processor"])
    import torch

    return torch.cuda.get_device_name()


def main(arguments: list[str] | None = None) -> int:
    """Runs a soak, prints its verdict, writes the files. Exit code: 1 if the verdict is not clean."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "jit"), default="eager")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--calls", type=int)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="writes everything that was read")
    parser.add_argument("--plot", type=Path, help="writes a picture")
    parsed = parser.parse_args(arguments)
    if parsed.device == "cpu":
        import torch

        torch.set_num_threads(1)  # waking a second thread takes unpredictable time on a busy machine
    calls = calls_of(parsed.mode, parsed.device, parsed.seed)
    budget = Budget(parsed.calls, None if parsed.minutes is None else parsed.minutes * 60)
    result = {
        **{"mode": parsed.mode, "device": parsed.device, "device_name": device_name(parsed.device)},
        **{"seed": parsed.seed, "environment": environment()},
        **soak(calls, budget, _progress),
    }
    faults = soak_verdict.faults(result)
    result |= {"figures": soak_verdict.figures(result), "faults": faults}
    if parsed.json is not None:
        parsed.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if parsed.plot is not None:
        from benchmarks.soak_report import figure

        figure([result]).savefig(parsed.plot)
    print("\n".join([*soak_verdict.lines(result), *(faults or ["nothing grows"])]))
    return 1 if faults else 0


def _progress(point: dict[str, Any]) -> None:
    resident, blocks = point["resident"] / 2**20, point["blocks"]
    print(
        f"{point['calls']:9} calls {point['seconds']:7.0f} s  {resident:8.1f} MiB {blocks:9} blocks "
        f"{point['descriptors']:4} descriptors {point['threads']:4} threads  ratio {point['ratio']:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
