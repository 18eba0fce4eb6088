"""The training in JAX over the devices of one process: ``python -m examples.training.jax_ranks FOLDER``.

The process first trains on one device, and then on all devices, each with its shards of every row. On a CPU, XLA must
be told the number of devices before it starts, so this runs in a process of its own.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core import SeqInfo
from examples.training.data import Batch
from examples.training.jax_side import JaxTrainer
from examples.training.spread import AXIS, Spread, SpreadRun, compared
from jax_frontend import explain_context_parallel, shard_sequence
from jax_frontend.nnx import Attention


class RanksTrainer(JaxTrainer):
    """The trainer of all ranks. Rows are in the order of shards; every device has the weights.

    Args:
        spread: the strategy, layout and documents of the model; cut: the layout of the shards, the same unless wrong.
        length: positions of a row.
    """

    def __init__(self, mesh: Mesh, spread: Spread, cut: str, length: int, **options: Any) -> None:
        self.mesh, self.spread, self.cut, self.length = mesh, spread, cut, length
        self._programs: dict[tuple[int, ...], Any] = {}
        self._info: SeqInfo | None = None
        layer: dict[str, Any] = {"context_axis": AXIS, "context_length": length}
        layer |= {"context_strategy": spread.strategy, "context_layout": spread.layout}
        super().__init__(attention=partial(Attention, **layer), **options)
        self.state = jax.device_put(self.state, NamedSharding(mesh, P()))

    def step(self, batch: Batch) -> float:
        """Updates the weights with one batch, by the program of its documents; returns the loss before the update."""
        info = batch.seq_info
        documents = () if info is None else tuple(map(int, info.cu_seqlens_q))
        if documents not in self._programs:
            # A function of its own for each packing: the plan, and so the program, depends on the documents.
            def program(state: Any, shards: Batch) -> Any:
                self._info = self.spread.for_model(info)
                return self._traced(state, shards)

            self._programs[documents] = jax.jit(program, donate_argnums=0)
        self._step = self._programs[documents]
        return super().step(batch)

    def _placed(self, batch: Batch) -> Batch:
        cut = {"layout": self.cut, "seq_info": batch.seq_info}
        shards: list[Any] = [shard_sequence(jnp.asarray(whole), self.mesh, **cut) for whole in batch[:3]]
        return Batch(*shards)

    def _loss(self, weights: Any, batch: Batch) -> jax.Array:
        def total(weights: Any, *shards: Any) -> jax.Array:
            return jax.lax.psum(self._sum(weights, Batch(*shards, self._info)), AXIS)

        row = P(None, AXIS)
        mapped = jax.shard_map(total, mesh=self.mesh, in_specs=(P(), row, row, row), out_specs=P())
        return mapped(weights, *batch[:3]) / batch.counted.sum()  # and gradients of weights are summed over devices

    def explained(self, batch: Batch, layer: int) -> str:
        """Returns the strategy and the backends of a layer's attention."""
        q, k, v = self._heads(*self._placed(batch).tokens.shape)
        explained = explain_context_parallel(
            q,
            k,
            v,
            mesh=self.mesh,
            strategy=self.spread.strategy,
            layout=self.spread.layout,
            length=self.length,
            seq_info=self.spread.for_model(batch.seq_info),
            needs_backward=True,
            **self._options(layer),
        )
        return f"{explained.choice.strategy} on {', '.join(sorted({name for _, name in explained.call.backends}))}"


def main(folder: Path) -> None:
    """Trains, and writes the result."""
    run = SpreadRun.read(folder)
    spread, device, batches = run.spread, run.options.device, run.batches()
    if device == "cpu":
        jax.config.update("jax_num_cpu_devices", spread.ranks)
    mesh = Mesh(np.array(jax.devices(device)[: spread.ranks]), (AXIS,))
    ranks = partial(RanksTrainer, mesh, cut=spread.layout, length=run.length, **run.trainer)
    results = compared(partial(JaxTrainer, **run.trainer), ranks, spread, batches)
    (folder / "jax.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
