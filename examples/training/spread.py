"""What the processes of a run over ranks are told, and what they answer: JSON in a folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from attn_core.context_parallel.layout import LAYOUTS
from examples.training import data, weights
from examples.training.config import AdamW, GemmaConfig, Options
from examples.training.data import Batch
from examples.training.steps import Trainer, train

ONE, RANKS, FAULT = "one rank", "ranks", "planted fault"
FIRST = 10
"""The steps that must agree closely, before rounding has been fed back often. The planted fault takes no more."""
AXIS = "cp"
"""The mesh axis that rows are spread over."""


@dataclass(frozen=True)
class Spread:
    """How rows are spread: over so many ranks, by a strategy (None chooses) and in a layout."""

    ranks: int = 2
    strategy: str | None = None
    layout: str = "zigzag"

    @property
    def mistaken(self) -> Spread:
        """Another layout than that of the shards, which nobody can see."""
        return replace(self, layout=next(name for name in LAYOUTS if name != self.layout))


class SpreadTrainer(Trainer, Protocol):
    """What the trainers here offer."""

    def moment(self) -> float: ...


class Asked(NamedTuple):
    """A run: the model, the options (rows are those of ``options.dense``) and the ranks."""

    config: GemmaConfig
    options: Options
    spread: Spread

    def write(self, folder: Path) -> None:
        """Leaves it for the processes."""
        told = {name: asdict(value) for name, value in self._asdict().items()}
        (folder / "asked.json").write_text(json.dumps(told), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Asked:
        """What was left."""
        told = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
        options = {**told["options"], "optimizer": AdamW(**told["options"]["optimizer"])}
        return cls(GemmaConfig(**told["config"]), Options(**options), Spread(**told["spread"]))

    @property
    def length(self) -> int:
        """Positions of a row."""
        return self.options.dense["length"]

    @property
    def trainer(self) -> dict[str, Any]:
        """The arguments of every trainer."""
        first = weights.initial(self.config, self.options.seed)
        return {"config": self.config, "weights": first, "backend": self.options.backend, **self.options.trainer}

    def batches(self) -> list[Batch]:
        """Dense rows: the offsets of packed documents are part of a plan, and JAX would compile a step for each."""
        endless = data.dense_batches(data.python_documentation(), **self.options.dense, seed=self.options.seed)
        return list(itertools.islice(endless, self.options.steps))


def compared(
    alone: Callable[[], SpreadTrainer], ranks: Callable[..., Any], spread: Spread, batches: list[Batch]
) -> dict[str, Any]:
    """One rank, all of them, and all with a planted fault; and how the first two layers ran over ranks.

    ``ranks(spread=...)`` makes a trainer.
    """
    makers = {ONE: alone, RANKS: partial(ranks, spread=spread), FAULT: partial(ranks, spread=spread.mistaken)}
    found: dict[str, Any] = runs(makers, batches)
    trainer = ranks(spread=spread)
    return {**found, "explained": [trainer.explained(batches[0], layer) for layer in (0, 1)]}


def runs(trainers: dict[str, Callable[[], SpreadTrainer]], batches: list[Batch]) -> dict[str, dict[str, Any]]:
    """Trains with each: losses, seconds, and AdamW's running mean of gradients after every step."""
    found = {}
    for name, make in trainers.items():
        trainer, moments = make(), list[float]()

        def moved(trainer: SpreadTrainer = trainer, moments: list[float] = moments) -> None:
            moments.append(trainer.moment())

        found[name] = {**train(trainer, batches[: FIRST if name == FAULT else None], moved), "moments": moments}
    return found
