"""Judges a soak: what may grow, and by how much."""

from __future__ import annotations

import statistics
from typing import Any

import caches

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
