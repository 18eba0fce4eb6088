"""What the benchmarks of context parallelism measure, in both frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

HEADS, KV_HEADS, DIM = 32, 8, 128
SHARDS = (8192, 16384, 32768)
"""Tokens of a rank."""
LONG = (2**19, 2**20)
"""Tokens of rows whose forward alone is run."""
ROUNDS, REST = 4, 0.05
"""How often each candidate has its turn, and the seconds before one in which the GPUs recover."""


class Shape(NamedTuple):
    """One causal row of bfloat16 over ``world`` ranks."""

    shard: int
    world: int

    @property
    def tokens(self) -> int:
        """Of the whole row."""
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
"""Options whose errors are measured."""
RESULTS = ("out", "dq", "dk", "dv")
"""Whose errors those are."""
CHECKED, MORE = 2048, 77
"""Tokens of a rank whose errors are measured, and what the row has besides, so that it does not divide."""


def calls_of(shape: Shape, *, training: bool) -> int:
    """How many calls are timed together: forwards of short rows are many, so that a queue's beginning counts little."""
    return max(2, min(16, 2**18 // shape.tokens) if training else min(64, 2**34 // shape.tokens**2))


def write_measures(found: dict[str, Any], measures: dict[str, Iterable[Callable[[], Any]]], path: str | None) -> None:
    """Adds to ``found`` what each of the measures gives, and writes it after every one; nowhere without a path."""
    for name, of_name in measures.items():
        found[name] = []
        for measure in of_name:
            found[name].append(measure())
            if path is not None:
                with open(path, "w") as file:
                    json.dump(found, file, indent=1)
