"""Timing of candidates that take turns in one process, so that their ratios are meaningful."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from typing import Any


def side_by_side(
    candidates: dict[str, Callable[[], Any]], *, calls: int, rounds: int, untimed: int = 1
) -> dict[str, list[float]]:
    """Returns the seconds per call of each candidate in each round; the rounds interleave the candidates.

    Each turn begins with ``untimed`` calls: threads of the last candidate may still be running, and a GPU's clock
    follows the load of the last milliseconds.
    """
    for run in candidates.values():
        for _ in range(3):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in candidates.items():
                for _ in range(untimed):
                    run()
                began = time.perf_counter()
                for _ in range(calls):
                    run()
                seconds[name].append((time.perf_counter() - began) / calls)
    finally:
        gc.enable()
    return seconds


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Returns the median seconds per call of each candidate."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def median_difference(seconds: dict[str, list[float]], name: str, baseline: str) -> float:
    """Returns the median over rounds of (candidate - baseline), in seconds per call."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return statistics.median(one - other for one, other in pairs)


def median_ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> float:
    """Returns the median over rounds of (baseline / candidate): how many times as fast the candidate is."""
    pairs = zip(seconds[name], seconds[baseline], strict=True)
    return statistics.median(other / one for one, other in pairs)


PACKAGES = (
    *("attn-core", "numpy", "torch", "triton", "jax", "jaxlib", "flax", "jax-tvm-ffi", "tokamax", "transformers"),
    *("flash-attn", "tokenspeed-fa3", "flash-attn-4", "nvidia-cudnn-cu13"),
)
"""The packages whose versions are recorded; None if one is not installed."""


def environment() -> dict[str, Any]:
    """Returns the date, the machine and the versions of a measurement."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
