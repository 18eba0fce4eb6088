"""The JAX side of ``benchmarks.context``: each row in the way that torch chose, forward and training.

One process has all devices.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from attn_core import SeqInfo
from benchmarks.context import REST, Row, described, rows_of, store, way_of
from benchmarks.measure import reason, timed
from benchmarks.tables import DIRECTIONS
from jax_frontend import shard_sequence
from jax_frontend.context_parallel.attention import context_parallel_attention

AXIS = "cp"
ROUNDS = 4
TURN = 0.05
"""The seconds of a turn, about."""


def main(task: dict[str, Any]) -> None:
    """Measures the rows of a task and writes the result."""
    on_gpu = task["device"] == "cuda"
    if not on_gpu:
        jax.config.update("jax_num_cpu_devices", task["ranks"])
    mesh = jax.make_mesh((task["ranks"],), (AXIS,), devices=jax.devices()[: task["ranks"]])
    measured = []
    for row in rows_of(task["seed"], task["rows"], small=not on_gpu):
        entry = described(row)
        for direction in DIRECTIONS:
            if time.time() > task["ends"]:
                entry["measured"][direction] = {"error": "not measured: out of time"}
                continue
            try:
                chosen = task["chosen"][row.name][direction]  # of torch
                entry["measured"][direction] = _measure(mesh, row, direction, chosen, on_gpu)
            except Exception as error:
                entry["measured"][direction] = {"error": reason(error)}
        measured.append(entry)
        store(task, measured, jax.devices()[0].device_kind)


def _measure(mesh: Any, row: Row, direction: str, chosen: str, on_gpu: bool) -> dict[str, Any]:
    """Returns the way, the seconds per call in each round, and the program's bytes on a device."""
    info = SeqInfo.from_lengths(row.lengths) if row.lengths else None
    dtype, keys = jnp.bfloat16 if on_gpu else jnp.float32, jax.random.split(jax.random.key(0), 4)
    heads = (row.heads, row.kv_heads, row.kv_heads, row.heads)
    shapes = [(1, row.tokens, each, row.head_dim) for each in heads]
    whole = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    strategy, layout = way_of(chosen)
    where = {"mesh": mesh, "strategy": strategy, "layout": layout, "seq_info": info}
    arrays = [shard_sequence(each, mesh, layout=layout, seq_info=info) for each in whole]
    length = None if row.lengths else row.tokens
    attend = partial(context_parallel_attention, **where, length=length, **row.options)

    def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](dout)

    def forward(q: Any, k: Any, v: Any, dout: Any) -> Any:
        return attend(q, k, v)

    program = jax.jit(forward if direction == DIRECTIONS[0] else both).lower(*arrays).compile()
    run = partial(program, *arrays)
    calls = max(2, min(32, int(TURN / max(_timed(run, 1), 1e-6))))
    memory = program.memory_analysis()
    return {
        "way": f"{strategy}, {layout}",
        "seconds": [_timed(run, calls) for _ in range(ROUNDS)],
        "temporary bytes": getattr(memory, "temp_size_in_bytes", None),
    }


def _timed(run: Callable[[], Any], calls: int) -> float:
    time.sleep(REST)  # as torch's turns do, because a GPU's clock is higher for a while after a wait
    return timed(run, calls)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
