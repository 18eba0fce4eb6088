"""The training loop: the loss and the seconds of every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from attn_core import Selection
from examples.training.data import Batch


class Trainer(Protocol):
    """The methods of both frameworks' trainers."""

    def step(self, batch: Batch) -> float: ...
    def selection(self, batch: Batch, layer: int) -> Selection: ...


def train(trainer: Trainer, batches: Iterable[Batch], on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Runs all steps; returns the loss before each, and its seconds until the loss is on the host."""
    losses, seconds = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - began)
        on_step()
    return {"losses": losses, "seconds": seconds}
