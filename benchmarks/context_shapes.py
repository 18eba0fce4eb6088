"""The shapes, candidates and options that the benchmarks of context parallelism measure, in both frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

HEADS, KV_HEADS, DIM = 32, 8, 128
SHARDS = (8192, 16384, 32768)
"""Tokens per rank."""
LONG = (2**19, 2**20)
"""Tokens of the long rows, of which only the forward runs."""
ROUNDS, REST = 4, 0.05
"""The turns of each candidate, and the seconds before each turn in which the GPUs recover."""


class Shape(NamedTuple):
    """One causal row of bfloat16 over ``world`` ranks."""

    shard: int
    world: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole row."""
        return self.shard * self.world


CANDIDATES: dict[str, dict[str, Any]] = {
    "ring, zigzag": {"strategy": "ring", "layout": "zigzag"},
    "all_gather, zigzag": {"strategy": "all_gather", "layout": "zigzag"},
    "ulysses, contiguous": {"strategy": "ulysses", "layout": "contiguous"},
    "ulysses, contiguous, 2 groups of heads": {"strategy": "ulysses", "layout": "contiguous", "head_groups": 2},
}
"""Keywords of ``context_parallel_attention`` by name."""


CASES: tuple[dict[str, Any], ...] = (
    {"causal": True},
    {"causal": True, "softcap": 30.0},
    {"causal": True, "window": 777},
)
"""The options of the calls whose errors are measured."""
RESULTS = ("out", "dq", "dk", "dv")
"""The results whose errors are measured."""
CHECKED, MORE = 2048, 77
"""Tokens per rank in the measurement of errors, and further tokens, so that the ranks do not divide the row."""


def calls_of(shape: Shape, *, training: bool) -> int:
    """Returns the number of calls in a turn: a quarter of a second on an H200, whose clock is higher after a wait."""
    return max(4, min(64, 2**20 // shape.tokens) if training else min(256, 2**36 // shape.tokens**2))


def write_measures(result: dict[str, Any], measures: dict[str, Iterable[Callable[[], Any]]], path: str | None) -> None:
    """Adds the rows of every measure to ``result``; after each one, writes ``result`` if there is a path."""
    for name, of_name in measures.items():
        result[name] = []
        for measure in of_name:
            result[name].append(measure())
            if path is not None:
                with open(path, "w") as file:
                    json.dump(result, file, indent=1)
