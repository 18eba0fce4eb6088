"""How long a rank's host takes to launch calls over ranks: a part of ``attn tune --ranks``, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from attn_core.context_parallel.cost.kernels import launches
from attn_core.context_parallel.cost.machine import MEASURED, Constants

TOKENS = 16
"""Of each rank: so few that launching a call takes longer than its kernels and messages."""
WAYS = (("ring", "zigzag"), ("all_gather", "zigzag"), ("ulysses", "contiguous"))
"""The calls that are timed, as (strategy, layout)."""
Run = Callable[[], Any]


class HostTime(NamedTuple):
    """The seconds in which the host launches one call over ranks.

    Attributes:
        launches: (tiles, exchanges) of the call, as the cost model counts them.
        forward, both: the seconds of a forward, and of a forward and its backward.
    """

    launches: tuple[int, int]
    forward: float
    both: float


def host_times(
    make: Callable[..., Any], heads: tuple[int, int, int], seconds: Callable[[Run], float]
) -> list[HostTime]:
    """Times tiny calls over all ranks.

    Args:
        make: returns random numbers ``[1, tokens, heads, head_dim]`` on the device of the ranks.
        heads: (heads, kv heads, head_dim).
        seconds: returns the seconds of a function on the slowest rank.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from torch_frontend import context_parallel_attention, explain_context_parallel

    count, kv_count, dim = heads
    shards = [make(TOKENS, each, dim).requires_grad_() for each in (count, kv_count, kv_count)]
    ranks, dout = dist.get_world_size(), torch.ones_like(shards[0])
    mesh = init_device_mesh(shards[0].device.type, (ranks,), mesh_dim_names=("cp",))
    times = []
    for strategy, layout in WAYS:
        if strategy == "ulysses" and kv_count % ranks:
            continue  # it would copy kv heads, or refuse them
        how: dict[str, Any] = {"mesh": mesh, "strategy": strategy, "layout": layout, "causal": True}

        def forward(how: Any = how) -> Any:
            with torch.no_grad():
                return context_parallel_attention(*shards, **how)

        def both(how: Any = how) -> Any:
            return torch.autograd.grad(context_parallel_attention(*shards, **how), shards, dout)

        plan = explain_context_parallel(*shards, **how).call.plan
        times.append(HostTime(launches(plan), seconds(forward), seconds(both)))
    return times


def host_figures(times: Sequence[HostTime]) -> dict[str, Any]:
    """Returns ``host_us`` and ``host_backward`` of the cost model, as ``Constants`` describes them.

    The parts of a call are in the proportion of MEASURED, because a few calls with other numbers of tiles and exchanges
    do not tell the parts apart when times vary. What is measured is one factor: how many times as long a call takes.
    """
    package = Constants.of(MEASURED)
    factor = median(each.forward / package.host_seconds(*each.launches, backward=False) for each in times)
    backward = median(each.both / each.forward - 1 for each in times)
    return {"host_us": [us * factor for us in package.host_us], "host_backward": max(0.0, backward)}
