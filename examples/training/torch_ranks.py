"""One rank of the training in torch: ``python -m torch.distributed.run ... -m examples.training.torch_ranks FOLDER``.

Every rank first trains alone, and then with the other ranks, on its shards of every row. Rank 0 writes the result.
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
from examples.training.spread import AXIS, Spread, SpreadRun, compared
from examples.training.torch_side import TorchTrainer
from torch_frontend.context_parallel.attention import explain_context_parallel, shard_sequence
from torch_frontend.context_parallel.layers import use_context_parallel

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others."""


class RankTrainer(TorchTrainer):
    """The trainer of one rank. It has its shards of every row; its weights stay equal to the other ranks' weights.

    Args:
        spread: the strategy, layout and documents of the model; cut: the layout of the shards, the same unless wrong.
    """

    def __init__(self, mesh: DeviceMesh, spread: Spread, cut: str, **options: Any) -> None:
        super().__init__(**options)
        self.mesh, self.spread, self.cut = mesh, spread, cut

    def _gradients(self, batch: Batch) -> torch.Tensor:
        cut = {"layout": self.cut, "seq_info": batch.seq_info}
        shards = [shard_sequence(whole, self.mesh, **cut) for whole in self._tensors(batch)]
        with use_context_parallel(self.mesh, **self._placement(batch)):
            loss = self._sum(shards, None) / float(batch.counted.sum())  # this rank's share of the mean
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        for share in (loss := loss.detach(), *gradients):
            dist.all_reduce(share, group=self.mesh.get_group())
        return loss

    def _placement(self, batch: Batch) -> dict[str, Any]:
        spread = self.spread
        placed = {"strategy": spread.strategy, "layout": spread.layout, "length": batch.tokens.shape[1]}
        return {**placed, "seq_info": spread.for_model(batch.seq_info)}

    def explained(self, batch: Batch, layer: int) -> str:
        """Returns the strategy and the backends of a layer's attention."""
        cut = {"layout": self.cut, "seq_info": batch.seq_info}
        shard = shard_sequence(torch.from_numpy(batch.tokens), self.mesh, **cut)
        q, k, v = (x.requires_grad_() for x in self._heads(*shard.shape))
        explained = explain_context_parallel(q, k, v, mesh=self.mesh, **self._placement(batch), **self._options(layer))
        return f"{explained.choice.strategy} on {', '.join(sorted({name for _, name in explained.call.backends}))}"


def main(folder: Path) -> None:
    """Trains in a process that torch's launcher started."""
    run = SpreadRun.read(folder)
    device = run.options.device
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=TIMEOUT)
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(device, (run.spread.ranks,), mesh_dim_names=(AXIS,))
    spread, batches = run.spread, run.batches()
    ranks = partial(RankTrainer, mesh, cut=spread.layout, **run.trainer)
    results = compared(partial(TorchTrainer, **run.trainer), ranks, spread, batches)
    if dist.get_rank() == 0:
        (folder / "torch.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
