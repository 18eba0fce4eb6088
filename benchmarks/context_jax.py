"""Measures context parallelism in JAX on several GPUs of one host: in one process, or in one process per GPU.

python -m benchmarks.context_jax --json part.json
torchrun --nproc-per-node 2 -m benchmarks.context_jax --json part.json         # only the speed
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.context_shapes import (
    CANDIDATES,
    CASES,
    CHECKED,
    DIM,
    HEADS,
    KV_HEADS,
    MORE,
    REST,
    RESULTS,
    ROUNDS,
    SHARDS,
    Shape,
    calls_of,
    write_measures,
)
from benchmarks.hopper_group import Turn, jax_turn, take_turns
from benchmarks.measure import environment
from jax_frontend import attention, explain_context_parallel, shard_sequence, unshard_sequence
from jax_frontend.context_parallel.attention import context_parallel_attention

AXIS = "cp"


def main(arguments: list[str] | None = None) -> None:
    """Measures every shape, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS))
    parser.add_argument(
        "--only", nargs="+", choices=("errors", "speed"), help="default: all that these processes can measure"
    )
    options = parser.parse_args(arguments)
    _join()
    several = jax.process_count() > 1
    if several and "errors" in (options.only or ()):
        parser.error("errors: needs whole rows in one process; run it without torchrun")
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    framework = "jax, a process a GPU" if several else "jax"
    measured: dict[str, Any] = {"framework": framework, "world": mesh.size, "environment": environment()}
    measures: dict[str, list[Callable[[], Any]]] = {
        "errors": [partial(errors, mesh)],
        "speed": [partial(speed, mesh, Shape(shard, mesh.size)) for shard in options.shards],
    }
    names = options.only or (["speed"] if several else list(measures))
    path = options.json if jax.process_index() == 0 else None
    write_measures(measured, {name: measures[name] for name in names}, path)


def _join() -> None:
    """Joins the processes that ``torchrun`` started; each takes the GPU with its local rank."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        address = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT']) + 1}"  # MASTER_PORT itself is torch's
        jax.distributed.initialize(address, world, rank, local_device_ids=[local])


def errors(mesh: Any) -> dict[str, Any]:
    """Measures mean and largest errors against float64, of several GPUs and of one GPU with the same backend."""
    import torch

    from torch_frontend import attention as exactly

    tokens = CHECKED * mesh.size + MORE
    rng, heads = np.random.default_rng(1), (HEADS, KV_HEADS, KV_HEADS, HEADS)
    whole = [jnp.asarray(rng.standard_normal((1, tokens, each, DIM), np.float32), jnp.bfloat16) for each in heads]
    *leaves, dout = (torch.tensor(np.asarray(array, np.float64), device="cuda", requires_grad=True) for array in whole)
    where: dict[str, Any] = {"mesh": mesh, "axis_name": AXIS}
    measured = []
    for options in CASES:
        right = exactly(*leaves, backend="math", **options)
        gradients = torch.autograd.grad(right, leaves, dout.detach())
        exact = {name: each.detach().cpu().numpy() for name, each in zip(RESULTS, (right, *gradients), strict=True)}
        for name, keywords in CANDIDATES.items():
            of = {**where, "layout": keywords["layout"]}
            parts = [shard_sequence(array, **of) for array in whole]
            attend = partial(context_parallel_attention, length=tokens, **where, **keywords, **options)
            call = explain_context_parallel(
                *parts[:3], length=tokens, needs_backward=True, **where, **keywords, **options
            ).call
            chosen = tuple(dict.fromkeys(backend for _, backend in call.backends))
            several = [unshard_sequence(each, length=tokens, **of) for each in _both(attend, chosen)(*parts)]
            one = _both(partial(attention, **options), chosen)(*whole)
            compared = {
                result: {"several": _error(mine, exact[result]), "one": _error(alone, exact[result])}
                for result, mine, alone in zip(RESULTS, several, one, strict=True)
            }
            measured.append({"case": str(options), "candidate": name, "backend": " ".join(chosen), "errors": compared})
    return {"tokens": tokens, "found": measured}


def _both(attend: Callable[..., Any], backend: tuple[str, ...]) -> Callable[..., Any]:
    """Compiles the output and the gradients of q, k and v."""

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(partial(attend, backend=backend), q, k, v)
        return (out, *pull(dout))

    return jax.jit(both)  # type: ignore[no-any-return]


def _error(measured: Any, right: np.ndarray) -> dict[str, float]:
    apart = np.abs(np.asarray(jax.device_get(measured)).astype(np.float64) - right)
    return {"mean": float(apart.mean()), "max": float(apart.max())}


def speed(mesh: Any, shape: Shape) -> dict[str, Any]:
    """Measures the seconds of every candidate in every round, forward and forward + backward."""
    measured: dict[str, Any] = {"shard": shape.shard, "tokens": shape.tokens, "seconds": {}, "notes": {}}
    arrays = _arrays(mesh, shape.tokens)
    for training in (False, True):
        word, runs, notes = ("forward + backward" if training else "forward"), {}, {}
        for name, keywords in CANDIDATES.items():
            run = partial(_compiled(mesh, keywords, training), *arrays[: 4 if training else 3])
            try:
                jax.block_until_ready(run())
            except Exception as error:
                if jax.process_count() > 1:
                    raise  # the other processes run this candidate and would wait
                notes[name] = f"not run: {type(error).__name__}: {error}"
                print(name, notes[name][:600], flush=True)
                continue
            runs[name] = run
        measured["notes"][word] = notes
        turns = {name: _of_all(jax_turn(run)) for name, run in runs.items()}
        calls = calls_of(shape, training=training)
        measured["seconds"][word] = take_turns(turns, calls=calls, rounds=ROUNDS, rest=REST)
    return measured


def _of_all(turn: Turn) -> Turn:
    """Makes all processes begin a turn together; its time is that of the slowest process."""
    if jax.process_count() == 1:
        return turn

    def together(calls: int) -> float:
        multihost_utils.sync_global_devices("turn")
        return float(np.max(multihost_utils.process_allgather(np.float32(turn(calls)))))

    return together


def _arrays(mesh: Any, tokens: int) -> list[Any]:
    placed = NamedSharding(mesh, PartitionSpec(None, AXIS))

    @partial(jax.jit, static_argnums=1, out_shardings=placed)
    def normal(key: Any, heads: int) -> Any:
        return jax.random.normal(key, (1, tokens, heads, DIM), jnp.bfloat16)

    keys = jax.random.split(jax.random.key(0), 4)
    return [normal(key, heads) for key, heads in zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True)]


def _compiled(mesh: Any, keywords: dict[str, Any], training: bool) -> Callable[..., Any]:
    attend = partial(context_parallel_attention, axis_name=AXIS, causal=True, **keywords)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](dout)

    spec = PartitionSpec(None, AXIS)
    body = both if training else attend
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
