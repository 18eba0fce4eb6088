"""One rank of the training in torch: ``python -m torch.distributed.run ... -m examples.training.torch_ranks FOLDER``.

Every rank trains alone first, and then with the others, each on its shards of every row. Rank 0 writes what was found.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from examples.training.data import Batch
from examples.training.spread import AXIS, Asked, Spread, compared
from examples.training.torch_side import TorchTrainer
from torch_frontend.context_parallel.attention import explain_context_parallel, shard_sequence
from torch_frontend.context_parallel.layers import use_context_parallel

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others."""


class RankTrainer(TorchTrainer):
    """A rank: its shards of every row, and weights that stay those of the other ranks.

    Args:
        spread: what the model is told; cut: the layout of the shards, which is to be the same.
    """

    def __init__(self, mesh: DeviceMesh, spread: Spread, cut: str, **given: Any) -> None:
        super().__init__(**given)
        self.mesh, self.spread, self.cut = mesh, spread, cut

    def _gradients(self, batch: Batch) -> torch.Tensor:
        shards = [shard_sequence(whole, self.mesh, layout=self.cut) for whole in self._tensors(batch)]
        with use_context_parallel(self.mesh, **self._told(batch)):
            loss = self._sum(shards, None) / float(batch.counted.sum())  # this rank's share of the mean
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        for share in (loss := loss.detach(), *gradients):
            dist.all_reduce(share, group=self.mesh.get_group())
        return loss

    def _told(self, batch: Batch) -> dict[str, Any]:
        spread = self.spread
        return {"strategy": spread.strategy, "layout": spread.layout, "length": batch.tokens.shape[1]}

    def explained(self, batch: Batch, layer: int) -> str:
        """How a layer's attention runs: strategy and backends."""
        shard = shard_sequence(torch.from_numpy(batch.tokens), self.mesh)
        q, k, v = (x.requires_grad_() for x in self._heads(*shard.shape))
        found = explain_context_parallel(q, k, v, mesh=self.mesh, **self._told(batch), **self._asked(layer))
        return f"{found.choice.strategy} on {', '.join(sorted({name for _, name in found.call.backends}))}"


def main(folder: Path) -> None:
    """Trains, as a process that torch's launcher started."""
    asked = Asked.read(folder)
    device = asked.options.device
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (asked.spread.ranks,), mesh_dim_names=(AXIS,))
    spread, batches = asked.spread, asked.batches()
    ranks = partial(RankTrainer, mesh, cut=spread.layout, **asked.trainer)
    found = compared(partial(TorchTrainer, **asked.trainer), ranks, spread, batches)
    if dist.get_rank() == 0:
        (folder / "torch.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
