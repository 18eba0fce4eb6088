"""Context parallelism of JAX over devices of the CPU, as an entry. The twin of torch_context.

JAX has several devices of the CPU only if it is told so before it starts, so the calls run in a process of their own.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from attn_core.cli.trial import Trial
from tests.campaign import rows_over_ranks
from tests.campaign.entries import Arrays, Entry
from tests.campaign.rows_over_ranks import RANKS, Sharing, ranks_of, sharing
from tests.campaign.workers import serve, workers_of

AXES = ("outer", "inner")


def _run(trial: Trial, backend: str | None, device: str) -> Arrays:
    # By the spec, so that the cases of a block share a program.
    how = sharing(trial.spec, trial.spec.digest())
    (results,) = workers_of(work, 1).run((trial, how))
    return results  # type: ignore[no-any-return]


def work(rank: int, count: int, folder: Path, connection: Connection) -> None:
    """Runs calls on several devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={RANKS}"}
    programs: dict[Any, Any] = {}

    def run(job: tuple[Trial, Sharing]) -> Arrays:
        return _over_devices(*job, programs)

    serve(connection, run)


def _over_devices(trial: Trial, how: Sharing, programs: dict[Any, Any]) -> Arrays:
    import jax

    from attn_core.cli.in_jax import arrays_of, cotangents_of

    with jax.enable_x64(trial.spec.dtype == "float64"):
        key = (trial.spec, how, None if trial.seq_info is None else tuple(trial.seq_info.cu_seqlens_q.tolist()))
        if key not in programs:
            programs.clear()
            programs[key] = jax.jit(_program(trial, how))
        constants, learned = arrays_of(trial)
        results = programs[key](learned, constants, cotangents_of(trial))
        return {name: np.asarray(array).astype(np.float64) for name, array in results.items()}


def _program(trial: Trial, how: Sharing) -> Any:
    """Returns a function of (learned inputs, other inputs, cotangents), whole rows, that returns the named results."""
    import jax
    import jax.numpy as jnp

    from attn_core.cli.in_jax import results_of
    from jax_frontend import context_parallel_attention, shard_sequence, unshard_sequence

    spec, info = trial.spec, trial.seq_info
    devices = np.array(jax.devices("cpu")[: ranks_of(how)]).reshape(how.axes)
    names = AXES[: len(how.axes)]
    mesh = jax.sharding.Mesh(devices, names)
    rows = 0 if spec.packed else 1
    placed: dict[str, Any] = {"axis_name": names if len(names) == 2 else names[0], "layout": how.layout}
    placed["seq_info"] = info
    kept = ("causal", "alignment", "window", "softcap", "scale", "deterministic", "return_lse")
    options = {name: getattr(spec, name) for name in kept} | placed | {"mesh": mesh, "backend": how.backend}
    options |= {"strategy": how.strategy, "head_groups": how.head_groups}
    options |= {"length": None if spec.packed else (spec.q_len, spec.kv_len)}

    def cut(array: Any, dim: int) -> Any:
        shards = shard_sequence(array, mesh, dim=dim, **placed)
        held = shard_sequence(jnp.ones(array.shape[dim]), mesh, dim=0, **placed)
        shape = [1] * array.ndim
        shape[dim] = -1
        return jnp.where(held.reshape(shape) == 0, jnp.nan, shards)  # values at places without a position

    def whole(array: Any, dim: int, length: int) -> Any:
        return unshard_sequence(array, mesh, length=length, dim=dim, **placed)

    def program(learned: Arrays, constants: Arrays, cotangents: tuple[Any, ...]) -> Arrays:
        given = learned | constants
        shards = {name: cut(given[name], rows) for name in "qkv"} | {"sinks": given["sinks"]}
        varied = {name: shards.pop(name) for name in learned}

        def forward(varied: Arrays) -> tuple[Any, ...]:
            results = context_parallel_attention(**shards, **varied, **options)
            return results if spec.return_lse else (results,)

        cut_cotangents = tuple(cut(each, rows + at) for at, each in enumerate(cotangents))
        results = results_of(forward, varied, cut_cotangents)
        dims = {"out": (rows, spec.q_len), "lse": (rows + 1, spec.q_len), "dq": (rows, spec.q_len)}
        dims |= dict.fromkeys(("dk", "dv"), (rows, spec.kv_len))
        return {name: whole(array, *dims[name]) if name in dims else array for name, array in results.items()}

    return program


ENTRIES = (
    Entry(
        "jax context_parallel_attention",
        _run,
        rows_over_ranks.refuses,
        shared=True,
        share=0.05,
        requests=False,
        same_documents=True,
        kinds=("cpu",),
        parts=4,
    ),
)
