"""Runs training steps in two gloo processes on the CPU for ``test_torch_entry_points``; gradients must equal one
process's.

Each process trains half of the batch through a small model with attention in both of its layers, as DDP and as FSDP
(``fully_shard``). Every gradient is compared with that of the whole batch in one process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torch_frontend import run_attention
from torch_frontend.finetrainers import attention_dispatch, attention_provider
from torch_frontend.module import Attention
from torch_frontend.unsloth import AttentionConfig, AttentionContext

PROCESSES, BATCH, LENGTH, FEATURES, HEADS = 2, 4, 7, 16, 4


class Block(nn.Module):
    """Our layer, then a named drop-in on its own projection."""

    def __init__(self, host: str) -> None:
        super().__init__()
        self.layer = Attention(HEADS, FEATURES, num_kv_heads=2, causal=True, softcap=5.0, sinks=True)
        self.inner, self.host = nn.Linear(FEATURES, 3 * FEATURES), host

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, features]`` -> the same."""
        x = x + self.layer(x)
        q, k, v = self.inner(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # each [batch, heads, length, dim]
        if self.host == "finetrainers":
            return x + attention_dispatch(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        batch, heads, length, dim = q.shape
        context = AttentionContext(bsz=batch, q_len=length, kv_seq_len=length, n_heads=heads, head_dim=dim)
        config = AttentionConfig("sdpa", n_kv_heads=heads, n_groups=1)
        return x + run_attention(config=config, context=context, Q=q, K=k, V=v).flatten(2)


def model() -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(Block("finetrainers"), Block("unsloth"))


def loss(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x) * torch.cos(x)).mean()


def whole(gradient: Any) -> Tensor:
    """The whole gradient of FSDP or DDP."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def step(rank: int, kind: str, compiled: bool) -> None:
    """One backward of this process's half; raises if a gradient differs from that of the whole batch."""
    x = torch.randn(BATCH, LENGTH, FEATURES, generator=torch.Generator().manual_seed(1))
    alone = model()
    loss(alone, x).backward()
    shared = model()
    if compiled:
        for block in shared:
            block.compile(backend="eager", fullgraph=True)
    if kind == "ddp":
        shared = DistributedDataParallel(shared)
    else:
        for block in shared:
            fully_shard(block)
        fully_shard(shared)
    with attention_provider("_native_math"):
        actual = loss(shared, x.chunk(PROCESSES)[rank])
    actual.backward()
    for (name, expected), got in zip(alone.named_parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(
            whole(got.grad), expected.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def run(rank: int, store: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    for kind in ("ddp", "fsdp"):
        for compiled in (False, True):
            step(rank, kind, compiled)
            torch._dynamo.reset()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, (sys.argv[1],), nprocs=PROCESSES)
