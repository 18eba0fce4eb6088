"""Context parallelism in JAX on several GPUs of one host, in one process.

python -m benchmarks.context_jax --json part.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.context_shapes import CANDIDATES, DIM, HEADS, KV_HEADS, REST, ROUNDS, SHARDS, Shape, calls_of
from benchmarks.hopper_group import jax_turn, take_turns
from benchmarks.measure import environment
from jax_frontend.context_parallel import context_parallel_attention

AXIS = "cp"


def main(arguments: list[str] | None = None) -> None:
    """Measures every shape, and writes the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS))
    options = parser.parse_args(arguments)
    mesh = jax.make_mesh((jax.device_count(),), (AXIS,))
    found: dict[str, Any] = {"framework": "jax", "world": mesh.size, "environment": environment(), "speed": []}
    for shard in options.shards:
        found["speed"].append(speed(mesh, Shape(shard, mesh.size)))
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


def speed(mesh: Any, shape: Shape) -> dict[str, Any]:
    """Seconds of every candidate in every round, forward and forward with backward."""
    found: dict[str, Any] = {"shard": shape.shard, "tokens": shape.tokens, "seconds": {}, "notes": {}}
    arrays = _arrays(mesh, shape.tokens)
    for training in (False, True):
        word, runs, notes = ("forward + backward" if training else "forward"), {}, {}
        for name, keywords in CANDIDATES.items():
            run = partial(_compiled(mesh, keywords, training), *arrays[: 4 if training else 3])
            try:
                jax.block_until_ready(run())
            except Exception as error:
                notes[name] = f"not run: {type(error).__name__}: {error}"
                print(name, notes[name][:600], flush=True)
                continue
            runs[name] = run
        found["notes"][word] = notes
        turns = {name: jax_turn(run) for name, run in runs.items()}
        calls = calls_of(shape, training=training)
        found["seconds"][word] = take_turns(turns, calls=calls, rounds=ROUNDS, rest=REST)
    return found


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
