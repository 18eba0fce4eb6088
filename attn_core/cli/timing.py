"""Times one call on several backends in turns, and compares their results."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep
from typing import Any, NamedTuple

WARM_UPS = 2
"""Calls before the first timed call; the first of them compiles."""

TURN = 0.006
"""Seconds that one backend's queue of calls should take in each round."""

MOST_CALLS = 200
"""The longest queue of calls in a round."""

TOO_SLOW = 50.0
"""A backend whose first timed call takes this many times as long as the fastest's is not timed further."""

BEHIND, BEHIND_ROUNDS = 2.0, 2
"""A backend this many times slower than the fastest runs in two rounds only, because its exact time decides nothing."""

SHORT = 0.001
"""A call of fewer seconds runs in every round, however slow it is beside the fastest: interference may decide."""

VERY_LONG = 0.5
"""A first call of this many seconds is not repeated before it is judged."""

LONG, LONG_ROUNDS = 0.03, 2
"""Calls of this many seconds run in two rounds at most. A call that is also BEHIND is timed once."""

AGREEMENT = {"bfloat16": 0.05, "float16": 0.02, "float32": 0.01, "float64": 1e-5}
"""The largest allowed difference from the first backend's results, relative to their largest value."""

Queue = tuple[float, float]
"""Seconds per call of a queue of calls: until the last result is there, and until the host has issued the last call."""

Entry = dict[str, Any]


class Calls(NamedTuple):
    """One call on several backends."""

    run: Callable[[str], tuple[Any, ...]]  # makes the call on a backend by name, and returns its results
    wait: Callable[[Any], Any] | None = None  # waits until results are there; None if ``run`` waits itself
    # whether torch's events on a CUDA stream measure the device's time. Then nothing waits for results.
    cuda_events: bool = False
    pause: float = 0.0  # seconds before each backend's turn


class DeviceLostError(RuntimeError):
    """A kernel left the device unusable for this process. The message starts with the backend's name."""


def measure(call: Calls, names: Sequence[str], rounds: int) -> dict[str, Entry]:
    """Measures microseconds per call of each backend in each round; the backends take turns within a round.

    Returns:
        Per backend ``{"microseconds": [...], "median": ..., "host": ..., "difference": ...}``: ``host`` is the median
        time until the call returns, and the difference is the largest between its results and the first backend's,
        relative to the largest of each result; or ``{"failed": reason}``.
    """
    entries: dict[str, Entry] = {}
    alone: dict[str, Queue] = {}
    results: tuple[Any, ...] | None = None
    for name in names:
        try:
            outcome, alone[name] = _warm_up(call, name, min(alone.values(), default=(0.0, 0.0))[0])
        except Exception as error:  # a backend that raises is a result to report
            entries[name] = {"failed": _one_line(error)}
            _check_device(call, name)
            continue
        if not all(bool((result - result == 0).all()) for result in outcome):  # inf - inf is NaN
            entries[name] = {"failed": "its results are not finite"}
            del alone[name]
            continue
        results = outcome if results is None else results
        entries[name] = {"difference": _difference(outcome, results)}
        del outcome  # frees the results on the device before the next backend runs
    fastest = min(alone.values(), default=(0.0, 0.0))[0]
    slow = {name: [alone.pop(name)] for name, queue in list(alone.items()) if _too_slow(queue[0], fastest)}
    timings, lost = _rounds(call, alone, rounds)
    for name, raised in lost.items():
        entries[name] = {"failed": _one_line(raised)}
    for name, timed in (timings | slow).items():
        micro, host = ([round(1e6 * queue[kind], 3) for queue in timed] for kind in (0, 1))
        entries[name] |= {"microseconds": micro, "median": round(statistics.median(micro), 3)}
        entries[name]["host"] = round(statistics.median(host), 3)
    for name in slow:
        entries[name]["note"] = "timed once: much slower than the fastest"
    return {name: entries[name] for name in names}


def fastest_round(entry: Entry) -> float:
    """Returns the microseconds of an entry's fastest round: what interferes with a round only makes it slower."""
    rounds = entry.get("microseconds")
    return min(rounds) if rounds else entry["median"]  # type: ignore[no-any-return]


def broken(entries: Mapping[str, Entry], dtype: str) -> list[str]:
    """Returns the backends that claim a call but raised, or whose numbers differ from the first backend's."""
    return [
        name
        for name, entry in entries.items()
        # "not <=" instead of ">", because a NaN difference must count as broken
        if "failed" in entry or not entry.get("difference", 0.0) <= AGREEMENT[dtype]
    ]


def right_times(entries: Mapping[str, Entry], dtype: str) -> dict[str, float]:
    """Returns the microseconds of the backends with right numbers."""
    wrong = broken(entries, dtype)
    return {name: fastest_round(entry) for name, entry in entries.items() if "median" in entry and name not in wrong}


def _too_slow(seconds: float, fastest: float) -> bool:
    return seconds > TOO_SLOW * fastest or (seconds > LONG and seconds > BEHIND * fastest)


def _warm_up(call: Calls, name: str, fastest: float) -> tuple[tuple[Any, ...], Queue]:
    """Calls a backend until it is compiled. Returns its results and the time of one call.

    Args:
        fastest: seconds of the fastest backend so far, or 0. A much slower one is timed only once.
    """
    outcome = call.run(name)
    first = _queue(call, name, 1)
    if first[0] > LONG or (fastest and _too_slow(first[0], fastest)):
        # A single call may be slow for once: some backends prepare later calls in their second one.
        first = min(first, _queue(call, name, 1)) if first[0] < VERY_LONG else first
        if first[0] > LONG or (fastest and _too_slow(first[0], fastest)):
            return outcome, first
    for _ in range(WARM_UPS - 1):
        call.run(name)
    return outcome, min(_queue(call, name, 1) for _ in range(2))


def _rounds(call: Calls, alone: dict[str, Queue], rounds: int) -> tuple[dict[str, list[Queue]], dict[str, Exception]]:
    """Runs the rounds. Returns the times of each round, and the error of each backend that raised, by name.

    A backend that raises does not run in later rounds.
    """
    lost: dict[str, Exception] = {}
    calls = {name: min(MOST_CALLS, max(1, round(TURN / queue[0]))) for name, queue in alone.items()}
    most = {name: _round_limit(queue[0], min(alone.values())[0], rounds) for name, queue in alone.items()}
    queues: dict[str, list[Queue]] = {name: [] for name in alone}
    # A collection during a round would count as the time of one backend.
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # Alternate the order, so that no backend always runs after the same other one (caches, clocks).
            for name in list(calls) if number % 2 == 0 else reversed(calls):
                if name in lost or number >= most[name]:
                    continue
                sleep(call.pause)
                try:
                    if calls[name] > 1:
                        call.run(name)
                    queues[name].append(_queue(call, name, calls[name]))
                except Exception as error:  # such as running out of memory
                    lost[name] = error
                    _check_device(call, name)
    finally:
        gc.enable()
    return {name: times for name, times in queues.items() if name not in lost}, lost


def _round_limit(seconds: float, fastest: float, rounds: int) -> int:
    if seconds > max(BEHIND * fastest, SHORT):
        return min(rounds, BEHIND_ROUNDS)
    return min(rounds, LONG_ROUNDS) if seconds > LONG else rounds


def _queue(call: Calls, name: str, count: int) -> Queue:
    """Returns the times of a queue of calls; the first one is the longer of the host's and the device's time."""
    if not call.cuda_events:
        began = perf_counter()
        for _ in range(count):
            results = call.run(name)
        host = (perf_counter() - began) / count
        if call.wait is None:
            return host, host
        call.wait(results)
        return (perf_counter() - began) / count, host
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()  # an idle device records the first event at once, so the host's time counts too
    began = perf_counter()
    begin.record()
    for _ in range(count):
        call.run(name)
    host = perf_counter() - began
    end.record()
    end.synchronize()
    return max(begin.elapsed_time(end) / 1e3, host) / count, host / count


def _difference(results: tuple[Any, ...], reference: tuple[Any, ...]) -> float:
    """Returns the largest difference of results, relative to the largest number of each reference."""
    if results is reference:
        return 0.0
    gaps = (
        # 1e-30 guards a result that is 0 everywhere.
        float(abs(one - other).max()) / max(float(abs(other).max()), 1e-30)
        for one, other in zip(results, reference, strict=True)
    )
    return round(max(gaps), 8)


def _check_device(call: Calls, name: str) -> None:
    """Raises DeviceLostError if a backend has broken the GPU for this process: every later time would be wrong."""
    if not call.cuda_events:
        return
    import torch

    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # one backend's cached memory must not make the next run out of memory
    except Exception as error:
        raise DeviceLostError(f"{name}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
