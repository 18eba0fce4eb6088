"""A run over ranks: its description and its results, which processes exchange as JSON in a folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from attn_core import SeqInfo
from examples.training import data, weights
from examples.training.config import AdamW, GemmaConfig, Options
from examples.training.data import Batch
from examples.training.steps import Trainer, train

ONE, RANKS, FAULT = "one rank", "ranks", "planted fault"
FIRST = 10
"""The number of first steps that must agree closely, because little rounding has accumulated. The planted fault runs
only these steps."""
FILE = "run.json"
AXIS = "cp"
"""The mesh axis that splits rows."""


@dataclass(frozen=True)
class Spread:
    """The number of ranks, the strategy (None for automatic choice), the layout, and whether rows hold documents.

    ``reversed`` tells the model the documents from the row's end to its beginning, which is an error.
    """

    ranks: int = 2
    strategy: str | None = None
    layout: str = "zigzag"
    packed: bool = False
    reversed: bool = False

    @property
    def mistaken(self) -> Spread:
        """The planted fault, which no check can detect, because the sizes of shards are right.

        The model has another layout than its shards. Dealt documents may have shards of another size than any other
        layout, so there the model has the documents in reverse: their lengths alone decide about the size.
        """
        if self.layout == "documents":
            return replace(self, reversed=True)
        return replace(self, layout="contiguous" if self.layout == "zigzag" else "zigzag")

    def for_model(self, info: SeqInfo | None) -> SeqInfo | None:
        """Returns the documents that are passed to the model."""
        if info is None or not self.reversed:
            return info
        return SeqInfo.from_lengths(np.diff(info.cu_seqlens_q)[::-1].tolist())


def packings(length: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Returns two lists of documents' lengths, each ``length`` in all, less a remainder, and none above ``longest``.

    The lengths are multiples of 16. All layouts over 2, 4 or 8 ranks then have shards of one size, except "documents",
    so only the losses show the planted fault.
    """
    units, most = length // 16, max(1, longest // 16)
    first = (units // 2, units // 4, 1, units - units // 2 - units // 4 - 1)
    second = (1, units - units // 3 - 2, 1, units // 3)
    return tuple(
        tuple(16 * min(most, each - start) for each in lengths for start in range(0, each, most))
        for lengths in (first, second)
    )


class SpreadTrainer(Trainer, Protocol):
    """A trainer that also returns the norm of AdamW's running mean of gradients."""

    def moment(self) -> float: ...


class SpreadRun(NamedTuple):
    """A run over ranks: the model, the options (rows have the shape of ``options.dense``) and the ranks."""

    config: GemmaConfig
    options: Options
    spread: Spread

    def write(self, folder: Path) -> None:
        """Writes the run to a file in the folder."""
        fields = {name: asdict(value) for name, value in self._asdict().items()}
        (folder / FILE).write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> SpreadRun:
        """Reads the run from the file that ``write`` wrote."""
        fields = json.loads((folder / FILE).read_text(encoding="utf-8"))
        options = {**fields["options"], "optimizer": AdamW(**fields["options"]["optimizer"])}
        return cls(GemmaConfig(**fields["config"]), Options(**options), Spread(**fields["spread"]))

    @property
    def length(self) -> int:
        """The number of positions in a row."""
        return sum(self._packings[0]) if self.spread.packed else self.options.dense["length"]

    @property
    def _packings(self) -> tuple[tuple[int, ...], ...]:
        return packings(self.options.length, self.options.longest)

    @property
    def trainer(self) -> dict[str, Any]:
        """The arguments of every trainer."""
        first = weights.initial(self.config, self.options.seed)
        return {"config": self.config, "weights": first, "backend": self.options.backend, **self.options.trainer}

    def batches(self) -> list[Batch]:
        """Returns dense rows, or rows of packed documents in two packings."""
        text, seed = data.python_documentation(), self.options.seed
        if self.spread.packed:
            endless = data.document_batches(text, self._packings, seed)
        else:
            endless = data.dense_batches(text, **self.options.dense, seed=seed)
        return list(itertools.islice(endless, self.options.steps))


def compared(
    alone: Callable[[], SpreadTrainer], ranks: Callable[..., Any], spread: Spread, batches: list[Batch]
) -> dict[str, Any]:
    """Trains on one rank, over all ranks, and over all ranks with a planted fault.

    The result also has the strategy and backends of the first two layers. ``ranks(spread=...)`` returns a trainer.
    """
    makers = {ONE: alone, RANKS: partial(ranks, spread=spread), FAULT: partial(ranks, spread=spread.mistaken)}
    results: dict[str, Any] = runs(makers, batches)
    trainer = ranks(spread=spread)
    return {**results, "explained": [trainer.explained(batches[0], layer) for layer in (0, 1)]}


def runs(trainers: dict[str, Callable[[], SpreadTrainer]], batches: list[Batch]) -> dict[str, dict[str, Any]]:
    """Trains with each trainer: losses, seconds, and the norm of AdamW's mean of gradients after every step."""
    results = {}
    for name, make in trainers.items():
        trainer, moments = make(), list[float]()

        def moved(trainer: SpreadTrainer = trainer, moments: list[float] = moments) -> None:
            moments.append(trainer.moment())

        results[name] = {**train(trainer, batches[: FIRST if name == FAULT else None], moved), "moments": moments}
    return results
