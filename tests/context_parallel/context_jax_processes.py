"""One of several processes that share a row in JAX: what it finds is compared with the whole row in one.

python context_jax_processes.py RANK PROCESSES PORT cpu|cuda BACKEND
python context_jax_processes.py RANK PROCESSES PORT dies ""            # the last one dies after a call
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import Any

import jax
import numpy as np

LENGTH = 421
CASES = {
    "cpu": [("all_gather", "zigzag"), ("ring", "zigzag"), ("ring", "striped"), ("ulysses", "contiguous")],
    "cuda": [("all_gather", "zigzag"), ("ring", "zigzag")],
}


def joined(rank: int, processes: int, port: int, *, on_cpu: bool = True, heartbeat: int = 100) -> Any:
    """The mesh of all processes, each with two CPU devices or a GPU.

    Args:
        heartbeat: seconds without a sign of life after which a process counts as dead.
    """
    if on_cpu:
        jax.config.update("jax_num_cpu_devices", 2)
    devices = None if on_cpu else [rank]
    jax.distributed.initialize(
        f"localhost:{port}", processes, rank, local_device_ids=devices, heartbeat_timeout_seconds=heartbeat
    )
    mesh = jax.make_mesh((jax.device_count(),), ("cp",))
    assert mesh.size == processes * (2 if on_cpu else 1) == processes * jax.local_device_count()
    return mesh


def without_one(rank: int, processes: int, port: int) -> None:
    """Calls once, after which the last process dies and the others wait, for nothing that it has."""
    from jax_frontend import context_parallel_attention, shard_sequence

    where = {"mesh": joined(rank, processes, port, heartbeat=10), "axis_name": "cp"}
    x = shard_sequence(jax.numpy.ones((1, LENGTH, 2, 8)), **where)
    call = jax.jit(lambda x: context_parallel_attention(x, x, x, layout="zigzag", causal=True, length=LENGTH, **where))
    call(x).block_until_ready()
    print("called", flush=True)
    if rank == processes - 1:
        os._exit(3)
    time.sleep(100)
    print("waited", flush=True)


def main(rank: int, processes: int, port: int, device: str, backend: str) -> None:
    """Raises AssertionError for a result that is not that of one device."""
    on_cpu = device == "cpu"
    mesh = joined(rank, processes, port, on_cpu=on_cpu)
    from jax.experimental.multihost_utils import process_allgather

    from jax_frontend import attention, context_parallel_attention, shard_sequence, unshard_sequence

    rng, dim, dtype = np.random.default_rng(0), *((8, jax.numpy.float64) if on_cpu else (64, jax.numpy.bfloat16))
    whole = [jax.numpy.asarray(rng.standard_normal((1, LENGTH, heads, dim)), dtype) for heads in (8, 4, 4, 8)]
    trained = backend != "flash3"  # whose published build has no backward
    window = None if backend in ("flash2", "sdpa_flash") else 300  # they refuse tiles whose windows are open to a side

    def run(call: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        call = partial(call, causal=True, window=window, backend=backend)
        if not trained:
            return (call(q, k, v),)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    alone = jax.jit(partial(run, attention))(*whole)
    for strategy, layout in CASES[device]:
        where = {"mesh": mesh, "axis_name": "cp", "layout": layout}
        call = partial(context_parallel_attention, strategy=strategy, length=LENGTH, **where)
        found = jax.jit(partial(run, call))(*(shard_sequence(array, **where) for array in whole))
        for one, other in zip(found, alone, strict=True):
            assert not one.is_fully_addressable, "every process holds its own part alone"
            back = process_allgather(unshard_sequence(one, length=LENGTH, **where), tiled=True)
            one, other = (np.asarray(each).astype(np.float64) for each in (back, other))
            rtol, atol = (1e-12, 1e-12) if on_cpu else (0.05, 0.02 * np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=f"{strategy}, {layout}")


if __name__ == "__main__":
    number, count, where_to_meet, kind, name = sys.argv[1:]
    place = int(number), int(count), int(where_to_meet)
    without_one(*place) if kind == "dies" else main(*place, kind, name)
