"""Context parallelism of torch over ranks in gloo processes, as an entry. The twin of jax_context."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from attn_core.cli.trial import Trial
from tests.campaign import rows_over_ranks
from tests.campaign.entries import Arrays, Entry
from tests.campaign.rows_over_ranks import AXES, RANKS, Sharing, ranks_of, sharing
from tests.campaign.workers import SECONDS, serve, workers_of

NAMES = {1: ("ranks",), 2: ("outer", "inner")}


def _run(trial: Trial, backend: str | None, device: str) -> Arrays:
    how = sharing(trial.spec, trial.seed)
    results = workers_of(work, RANKS).run((trial, how))[: ranks_of(how)]
    whole: Arrays = dict(results[0])
    if "dsinks" in whole:
        whole["dsinks"] = sum(each["dsinks"] for each in results)  # each rank has its share
    return whole


def work(rank: int, count: int, folder: Path, connection: Connection) -> None:
    """Runs calls as one rank."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=SECONDS),
    )
    # All ranks make all meshes, in one order; those that are not in a mesh do nothing in its calls.
    meshes = {
        axes: DeviceMesh(
            "cpu", torch.arange(int(np.prod(axes)), device="cpu").reshape(axes), mesh_dim_names=NAMES[len(axes)]
        )
        for axes in AXES
    }

    def run(job: tuple[Trial, Sharing]) -> Arrays | None:
        trial, how = job
        return _shard(trial, how, meshes[how.axes]) if rank < ranks_of(how) else None

    serve(connection, run)


def _shard(trial: Trial, how: Sharing, mesh: Any) -> Arrays:
    """Runs this rank's shard of a call. Returns whole rows, and this rank's share of the gradient of the sinks."""
    import torch

    from torch_frontend import context_parallel_attention, shard_sequence, unshard_sequence

    spec, inputs, info = trial.spec, trial.inputs, trial.seq_info
    rows = 0 if spec.packed else 1
    dtypes = [getattr(torch, name) for name in (spec.dtype, spec.lse_dtype)]
    lengths = {"q": spec.q_len, "k": spec.kv_len, "v": spec.kv_len}
    placed: dict[str, Any] = {"layout": how.layout, "seq_info": info}

    def cut(array: np.ndarray, dim: int, dtype: Any) -> Any:
        whole = torch.from_numpy(array).to(dtype)
        shard = shard_sequence(whole, mesh, dim=dim, **placed)
        held = shard_sequence(torch.ones(whole.shape[dim], device="cpu"), mesh, dim=0, **placed)
        shard.movedim(dim, -1)[..., held == 0] = torch.nan  # values at places without a position must not matter
        return shard.requires_grad_(spec.needs_backward and dtype == dtypes[0])

    shards = {name: cut(getattr(inputs, name), rows, dtypes[0]) for name in lengths}
    sinks = None if inputs.sinks is None else torch.from_numpy(inputs.sinks).to(dtypes[1])
    if sinks is not None:
        sinks.requires_grad_(spec.needs_backward)
    names = ("causal", "alignment", "window", "softcap", "scale", "deterministic", "return_lse")
    options: dict[str, Any] = {name: getattr(spec, name) for name in names} | placed
    options |= {"strategy": how.strategy, "head_groups": how.head_groups, "backend": how.backend}
    options |= {"length": None if spec.packed else (spec.q_len, spec.kv_len), "mesh": mesh, "sinks": sinks}
    results: Any = context_parallel_attention(shards["q"], shards["k"], shards["v"], **options)
    out, *lse = results if spec.return_lse else (results,)
    parts: dict[str, Any] = {"out": (out, rows, spec.q_len)} | ({"lse": (lse[0], rows + 1, spec.q_len)} if lse else {})
    shares: dict[str, Any] = {}
    if spec.needs_backward:
        learned = {**shards, **({} if sinks is None else {"sinks": sinks})}
        cotangents = [cut(trial.dout, rows, dtypes[0]).detach()]
        cotangents += [] if trial.dlse is None else [cut(trial.dlse, rows + 1, dtypes[1]).detach()]
        gradients = torch.autograd.grad([out, *lse], list(learned.values()), cotangents)
        named = dict(zip(learned, gradients))
        parts |= {f"d{name}": (named[name], rows, length) for name, length in lengths.items()}
        shares = {} if sinks is None else {"dsinks": named["sinks"]}
    whole = {
        name: unshard_sequence(part.detach(), mesh, length=length, dim=dim, **placed)
        for name, (part, dim, length) in parts.items()
    }
    return {name: tensor.detach().to(torch.float64).numpy() for name, tensor in (whole | shares).items()}


ENTRIES = (
    Entry(
        "torch context_parallel_attention",
        _run,
        rows_over_ranks.refuses,
        requests=False,
        share=0.25,
        same_documents=True,
        kinds=("cpu",),
        parts=4,
    ),
)
