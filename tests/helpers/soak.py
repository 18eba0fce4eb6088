"""Runs ever-changing attention calls, and reads what they leave behind: memory, descriptors, threads, handlers, caches.

The time of a call is compared with a fixed piece of work that runs beside it, so a machine that becomes slower cancels.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import logging
import signal
import statistics
import sys
import threading
import time
import warnings
from tempfile import TemporaryFile
from typing import Any

import caches
import psutil
from soak_calls import EagerCalls

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


# What a reading reads

_PROCESS = psutil.Process()


def sample() -> dict[str, Any]:
    """Returns one reading, after a garbage collection.

    ``resident``, ``allocated`` and ``device`` are bytes. ``blocks`` counts the small pieces of memory that Python
    objects have, to the single object; pages of resident memory are too coarse to see a small leak early.
    """
    gc.collect()
    return {
        "resident": _PROCESS.memory_info().rss,
        "allocated": _allocated(),
        "blocks": sys.getallocatedblocks(),
        "objects": _objects(),
        "descriptors": _PROCESS.num_fds(),
        "threads": _PROCESS.num_threads(),
        "Python threads": threading.active_count(),
        "handlers": handlers(),
        "caches": caches.sizes(),
        "device": device_bytes(),
    }


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _allocated() -> int | None:
    """Returns the bytes that malloc has handed out; None without glibc. Unlike ``resident`` it has no free memory."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    read.restype = _Mallinfo
    found = read()
    return int(found.uordblks + found.hblkhd)


def _objects() -> int:
    """Returns how many objects of our packages' types the garbage collector knows."""
    return sum(str(type(each).__module__).partition(".")[0] in caches.PACKAGES for each in gc.get_objects())


def handlers() -> dict[str, int]:
    """Returns how many functions wait to be called: by signals, at exit, by loggers, by torch and so on."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    counts = {
        "signals": sum(callable(signal.getsignal(number)) for number in signal.valid_signals()),
        "atexit": atexit._ncallbacks(),
        "logging": sum(len(getattr(logger, "handlers", ())) for logger in loggers),
        "loggers": len(loggers),
        "warning filters": len(warnings.filters),
        "garbage collection": len(gc.callbacks),
        "imports": len(sys.meta_path),
    }
    if "torch" in sys.modules:
        counts |= _torch_hooks()
    return counts


def _torch_hooks() -> dict[str, int]:
    import torch

    modules = torch.nn.modules.module
    names = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("_hooks")]
    return {
        "module hooks": sum(len(getattr(modules, name)) for name in names),
        "hooks on saved tensors": int(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def device_bytes() -> dict[str, int]:
    """Returns the bytes of a GPU that each framework uses; empty on a CPU."""
    found = {}
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            found["torch allocated"] = torch.cuda.memory_allocated()
            found["torch reserved"] = torch.cuda.memory_reserved()
    if "jax" in sys.modules:
        import jax

        statistics = jax.local_devices()[0].memory_stats() or {}
        found |= {f"jax {name}": statistics[name] for name in ("bytes_in_use",) if name in statistics}
        found["jax arrays"] = len(jax.live_arrays())
    return found


# The verdict

BYTES_PER_CALL = 16
"""The most growth of resident memory in the last half. The smallest Python object takes 16 bytes."""
RESOLUTION = 4 * 2**20
"""Bytes. Resident memory moves by this much without a leak, because allocators keep and return whole arenas."""
BLOCKS_PER_CALL = 0.02
"""The most growth of Python's memory blocks in the last half: one object kept by one call of fifty."""
LOOSE_BLOCKS = 500
"""Blocks that come and go without a leak, such as those of numbers in lists that Python keeps for reuse."""
PROGRAM_BYTES, PROGRAM_BLOCKS = 256 * 2**10, 100
"""What each new program of JAX may add: JAX alone, without us, leaves 0.1 to 0.3 MiB and 80 blocks for each after
``jax.clear_caches`` (jax 0.10.2 on a CPU)."""
ENTRY_BYTES, ENTRY_BLOCKS = 2048, 30
"""What a new entry of one of our caches may hold. A cache that is full gains none, so this growth ends at its bound."""
SLOWER = 1.05
"""The most that a call may take in the last tenth, as a multiple of the first tenth."""

Points = list[dict[str, Any]]


def slope(points: Points, name: str) -> float:
    """Returns the growth per call: the median of the slopes between all pairs of points (Theil and Sen).

    A few outliers, such as a moment at which an allocator returns memory, do not move it.
    """
    pairs = [(one, other) for at, one in enumerate(points) for other in points[at + 1 :]]
    return statistics.median((b[name] - a[name]) / (b["calls"] - a["calls"]) for a, b in pairs) if pairs else 0.0


def halves(points: Points) -> tuple[Points, Points]:
    """Returns the points of the first half of the calls, and of the last."""
    middle = (points[0]["calls"] + points[-1]["calls"]) / 2
    return [each for each in points if each["calls"] <= middle], [each for each in points if each["calls"] > middle]


def tenths(points: Points) -> list[Points]:
    """Returns the points of each tenth of the run."""
    return [points[len(points) * tenth // 10 : len(points) * (tenth + 1) // 10] for tenth in range(10)]


def new_entries(points: Points) -> float:
    """Returns how many entries our caches gain per call."""
    sized = [{**each, "entries": sum(each["caches"].values())} for each in points if "caches" in each]
    return max(0.0, slope(sized, "entries"))


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures that the verdict and the report name, by name."""
    points: Points = result["points"]
    first, last = halves(points)
    settled = [each for each in last if each["settled"]]
    full = next((each["caches"] for each in reversed(points) if "caches" in each), {})
    programs, entries = slope(settled, "programs"), new_entries(last)
    by_tenth = [statistics.median(each["ratio"] for each in tenth) if tenth else None for tenth in tenths(points)]
    calls = last[-1]["calls"] - last[0]["calls"]
    return {
        "resident": [statistics.median(each["resident"] for each in half) for half in (first, last)],
        "bytes per call": slope(settled, "resident"),
        "bytes per call allowed": BYTES_PER_CALL
        + RESOLUTION / max(calls, 1)
        + PROGRAM_BYTES * programs
        + ENTRY_BYTES * entries,
        "blocks per call": slope(settled, "blocks"),
        "blocks per call allowed": BLOCKS_PER_CALL
        + LOOSE_BLOCKS / max(calls, 1)
        + PROGRAM_BLOCKS * programs
        + ENTRY_BLOCKS * entries,
        **{name: [max(each[name] for each in half) for half in (first, last)] for name in ("descriptors", "threads")},
        "allocated bytes per call": slope(settled, "allocated") if settled[0]["allocated"] is not None else None,
        "handlers": [sum(half[-1]["handlers"].values()) for half in (first, last)],
        "ratios": by_tenth,
        "last / first tenth": by_tenth[-1] / by_tenth[0] if by_tenth[0] and by_tenth[-1] else None,
        "fullest caches": dict(sorted(full.items(), key=lambda item: -item[1])[:10]),
    }


def faults(result: dict[str, Any], *, times: bool = True) -> list[str]:
    """Returns a sentence for everything that grows; none for a clean run.

    Args:
        times: whether to judge the time of calls, too.
    """
    points: Points = result["points"]
    found, (first, last) = figures(result), halves(points)
    sentences = []
    if found["bytes per call"] > found["bytes per call allowed"]:
        sentences.append(
            f"resident memory grows by {found['bytes per call']:.1f} bytes per call in the last half; at most "
            f"{found['bytes per call allowed']:.1f} are allowed"
        )
    if found["blocks per call"] > found["blocks per call allowed"]:
        sentences.append(
            f"Python's memory grows by {found['blocks per call']:.3f} blocks per call in the last half; at most "
            f"{found['blocks per call allowed']:.3f} are allowed"
        )
    for name in ("descriptors", "threads"):
        before, after = found[name]
        if after > before:
            sentences.append(f"{name}: {before} in the first half, {after} in the last")
    before, after = (half[-1]["handlers"] for half in (first, last))
    sentences += [
        f"handlers: {name}: {before.get(name, 0)} in the first half, {count} in the last"
        for name, count in after.items()
        if count > before.get(name, 0)
    ]
    for name, size in last[-1]["device"].items():
        earlier = max(each["device"].get(name, 0) for each in first)
        if min(each["device"].get(name, 0) for each in last[-10:]) > earlier:
            sentences.append(f"{name}: at most {earlier} in the first half, {size} at the end")
    sentences += sorted({sentence for each in points for sentence in caches.over_bound(each.get("caches", {}))})
    if times and found["last / first tenth"] and found["last / first tenth"] > SLOWER:
        sentences.append(
            f"a call of the last tenth takes {found['last / first tenth']:.3f} times as long as one of the first; at "
            f"most {SLOWER} are allowed"
        )
    return sentences
