"""Groups of candidates that take turns on one GPU, and figures from their times. Needs a GPU only to time a turn."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from attn_core.selection import NoBackendError
from benchmarks.measure import median_difference, median_ratio, medians

Turn = Callable[[int], float]
"""Runs a candidate once untimed and then the given number of times; returns the seconds per call."""

OURS = ("attention", "forward()")
"""The beginnings of the names of this project's candidates. An error in such a candidate is a failure."""


class Shape(NamedTuple):
    """A dense causal call: q ``[batch, seq, heads, head_dim]``, k and v ``[batch, seq, kv_heads, head_dim]``."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def query(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seq, self.heads, self.head_dim)

    @property
    def key(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seq, self.kv_heads, self.head_dim)

    def flops(self, what: str) -> float:
        """Returns the floating-point operations of a causal call, by the usual count.

        Half of the scores count. A forward has two matrix products of ``2 * heads * seq * seq * head_dim``, a backward
        five, so forward + backward has 3.5 times the operations of a forward.
        """
        forward = 4 * self.batch * self.heads * self.seq * self.seq * self.head_dim / 2
        return forward * (1.0 if what == "forward" else 3.5)

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.kv_heads}"
        return f"batch {self.batch}, seq {self.seq}, heads {heads}, head_dim {self.head_dim}, causal, bfloat16"


LARGE = Shape(4, 4096, 32, 8, 128)
TINY = Shape(1, 64, 4, 4, 64)


@dataclass
class Group:
    """A comparison of candidates: their times, the reasons of candidates that did not run, and the figures.

    Attributes:
        title, note: text for the page.
        flops: floating-point operations of one call, or None if the group is not about speed.
        seconds: seconds per call of each candidate in each round.
        not_run: candidate -> reason.
        figures: the figures that ``speed``, ``tflops``, ``extra`` and ``value`` added, as plain data.
    """

    title: str
    note: str = ""
    flops: float | None = None
    seconds: dict[str, list[float]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, makers: dict[str, Callable[[], Turn]], *, calls: int, rounds: int, rest: float = 0.0) -> Group:
        """Prepares and tries each candidate, then times the candidates that can run, in turns.

        Args:
            rest: idle seconds before each turn.
        """
        turns: dict[str, Turn] = {}
        for name, make in makers.items():
            try:
                turn = make()
                for _ in range(3):
                    turn(1)
                turns[name] = turn
            except Exception as error:  # any error of a candidate becomes the reason why it did not run
                self.not_run[name] = reason(name, error)
        self.seconds = take_turns(turns, calls=calls, rounds=rounds, rest=rest)
        return self

    def speed(self, name: str, candidate: str, baseline: str, goal: float | None = None) -> None:
        """Adds the candidate's speed divided by the baseline's, the median over rounds."""
        goal_text = None if goal is None else f">= {goal:g}"
        if self._lacks(name, goal_text, candidate, baseline):
            return
        times = median_ratio(self.seconds, candidate, baseline)
        self.value(name, times, f"times the speed of {baseline}", goal_text)

    def tflops(self, name: str, candidate: str, goal: float | None = None, beside: str | None = None) -> None:
        """Adds the candidate's median speed; the detail shows the speed of ``beside``, the goal's baseline."""
        goal_text = None if goal is None else f">= {goal:g}"
        if self._lacks(name, goal_text, candidate):
            return
        detail = f"{beside}: {self._tflops(beside):.0f} in the same run" if beside in self.seconds else ""
        self.value(name, self._tflops(candidate), "TFLOP/s", goal_text, detail)

    def extra(self, name: str, candidate: str, baseline: str, goal: float | None = None) -> None:
        """Adds the microseconds per call above the baseline, the median over rounds."""
        goal_text = None if goal is None else f"<= {goal:g}"
        if self._lacks(name, goal_text, candidate, baseline):
            return
        microseconds = median_difference(self.seconds, candidate, baseline) * 1e6
        self.value(name, microseconds, f"µs above {baseline}", goal_text)

    def value(self, name: str, value: float, unit: str, goal: str | None = None, detail: str = "") -> None:
        """Adds a figure; the goal is text, such as ``">= 0.98"`` or ``"<= 12"``."""
        held = None if goal is None else holds(value, goal)
        self.figures.append(
            {"name": name, "value": value, "unit": unit, "goal": goal, "held": held, "detail": detail, "not_run": None}
        )

    def missing(self, name: str, why: str, goal: str | None = None) -> None:
        """Adds a figure without a value, and the reason. If the reason is a failure, the goal is missed."""
        held = False if why.startswith("failed") else None
        self.figures.append(
            {"name": name, "value": None, "unit": "", "goal": goal, "held": held, "detail": "", "not_run": why}
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the group as plain data, with each candidate's median time and, if ``flops`` is set, its TFLOP/s."""
        speeds = {name: self._tflops(name) for name in self.seconds} if self.flops else {}
        return {**asdict(self), "median_seconds": medians(self.seconds), "tflops": speeds}

    def _tflops(self, candidate: str) -> float:
        if self.flops is None:
            raise ValueError(f"{self.title}: the floating-point operations of a call are unknown")
        return self.flops / medians(self.seconds)[candidate] / 1e12

    def _lacks(self, name: str, goal: str | None, *candidates: str) -> bool:
        for candidate in candidates:
            if candidate not in self.seconds:
                why = self.not_run.get(candidate, "not run: it is not among the candidates")
                lead, _, rest = why.partition(": ")
                self.missing(name, f"{lead}: {candidate}: {rest}", goal)
                return True
        return False


def holds(value: float, goal: str) -> bool:
    """Returns whether a value meets a goal such as ``">= 0.98"``."""
    sense, limit = goal.split()[:2]
    return value >= float(limit) if sense == ">=" else value <= float(limit)


def reason(name: str, error: Exception) -> str:
    """Returns ``"not run: ..."`` for a missing package or a refusal, ``"failed: ..."`` for an error in our own code."""
    if isinstance(error, NoBackendError):
        selection = error.selection
        named = selection.requested or selection.considered
        texts = [("" if len(named) == 1 else f"{one}: ") + ", ".join(selection.reasons(one)) for one in named]
        return f"not run: {'; '.join(texts)}"
    lead = "failed" if name.startswith(OURS) and not isinstance(error, ImportError) else "not run"
    lines = str(error).strip().splitlines() or [""]
    return f"{lead}: {type(error).__name__}: {lines[0][:300]}"


def take_turns(turns: dict[str, Turn], *, calls: int, rounds: int, rest: float = 0.0) -> dict[str, list[float]]:
    """Returns the seconds per call of each candidate in each round; the rounds interleave the candidates.

    A GPU is slower for a while after a kernel that drew much power. Each round therefore begins with the next
    candidate, and every other round runs backwards, so no candidate always follows the same neighbour. ``rest`` seconds
    before each turn let the GPU recover. Without them, a candidate would look slower than a neighbour with the same
    kernel.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    order = list(turns)
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            begin = number % max(len(order), 1)
            turned = order[begin:] + order[:begin]
            for name in reversed(turned) if number % 2 else turned:
                time.sleep(rest)
                seconds[name].append(turns[name](calls))
    finally:
        gc.enable()
    return seconds


def event_turn(run: Callable[[], Any]) -> Turn:
    """Times torch calls with CUDA events around a queue of calls."""
    import torch

    def turn(calls: int) -> float:
        run()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / calls

    return turn


def host_turn(run: Callable[[], Any], calls_in_run: int = 1) -> Turn:
    """Times torch calls with the host's clock around a queue of calls and the wait for their end."""
    import torch

    def turn(calls: int) -> float:
        run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / calls / calls_in_run

    return turn


def jax_turn(run: Callable[[], Any], calls_in_run: int = 1) -> Turn:
    """Times JAX calls with the host's clock around a queue of calls and the wait for the last result."""
    import jax

    def turn(calls: int) -> float:
        jax.block_until_ready(run())
        began = time.perf_counter()
        for _ in range(calls):
            last = run()
        jax.block_until_ready(last)
        return (time.perf_counter() - began) / calls / calls_in_run

    return turn
