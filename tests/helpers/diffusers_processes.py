"""Runs diffusers' context parallelism in two gloo processes on the CPU, with our attention in torch's place.

Each process has half of the tokens. With Ulysses, diffusers exchanges tokens for heads and calls torch's function for
half of the heads. Ring attention needs log-sum-exps, which diffusers' native backend has not; with
``diffusers_parallel`` it runs on our context parallelism.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

PROCESSES = 2
LAYERS, CALLS = {"num_layers": 1, "num_single_layers": 2}, 3


def model() -> torch.nn.Module:
    """A tiny Flux with an even number of heads; the same weights in every process."""
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    widths = {"in_channels": 4, "joint_attention_dim": 24, "pooled_projection_dim": 20, "axes_dims_rope": (4, 4, 8)}
    return FluxTransformer2DModel(**LAYERS, **widths, attention_head_dim=16, num_attention_heads=4).eval()


def inputs() -> dict[str, Any]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

    places = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(2.0), torch.arange(5.0), indexing="ij"), -1)
    return {
        "hidden_states": random(2, 10, 4),
        "encoder_hidden_states": random(2, 6, 24),
        "pooled_projections": random(2, 20),
        "timestep": torch.tensor([0.003, 0.5]),
        "img_ids": places.reshape(10, 3),
        "txt_ids": torch.zeros(6, 3),
    }


def run(rank: int, store: str, degree: str) -> None:
    """One process. It ends without torch's exit, in which threads of gloo sometimes abort it."""
    check(rank, store, degree)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def check(rank: int, store: str, degree: str) -> None:
    """Compares a model over processes with the whole one."""
    from diffusers import ContextParallelConfig

    from torch_frontend import diffusers as dropin
    from torch_frontend import diffusers_parallel

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    (expected,) = model()(**inputs(), return_dict=False)  # as pipelines call it
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it, and a CPU has 0
    net, ran = model(), []
    ours = dropin.attention_dispatch

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        ran.append(tuple(arguments[0].shape))
        return ours(*arguments, **options)

    dropin.attention_dispatch = counted
    with dropin.installed():
        net.enable_parallelism(config=ContextParallelConfig(**{degree: PROCESSES}))
        if degree == "ring_degree":
            with pytest.raises(ValueError, match="Native attention does not support return_lse=True"):
                net(**inputs(), return_dict=False)
            with diffusers_parallel.installed():
                (actual,) = net(**inputs(), return_dict=False)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            assert not ran
            return
        (actual,) = net(**inputs(), return_dict=False)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert ran == [(2, 2, 16, 16)] * CALLS, ran  # [batch, half of the heads, all tokens, head_dim]


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, tuple(sys.argv[1:]), nprocs=PROCESSES)
