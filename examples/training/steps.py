"""A run: the loss of every step, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from attn_core import Selection
from examples.training.data import Batch


class Trainer(Protocol):
    """What both sides offer."""

    def step(self, batch: Batch) -> float: ...
    def selection(self, batch: Batch, layer: int) -> Selection: ...


def train(trainer: Trainer, batches: Iterable[Batch], on_step: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Takes all steps: the loss before each, and its seconds until that loss is on the host."""
    losses, seconds = [], []
    for batch in batches:
        began = time.perf_counter()
        losses.append(trainer.step(batch))
        seconds.append(time.perf_counter() - began)
        on_step()
    return {"losses": losses, "seconds": seconds}
