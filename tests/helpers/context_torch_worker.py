"""Runs jobs of ``test_context_torch`` and other modules on ranks of context-parallel torch calls, in gloo processes.

``main(folder)`` reads ``worlds.pickle``: for each world its name, its number of ranks and its jobs, ``(module,
function, arguments)``. It forks the ranks of all worlds at once (torch is imported once). Rank r of world w writes the
results of its jobs, ``{job: result}``, to ``w.r.pickle``. A job that raises gives a ``Failed`` with the traceback, and
ends its rank's work, because the ranks no longer agree.
"""

from __future__ import annotations

import fcntl
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from attn_core import SeqInfo, masks
from attn_core.context_parallel.layout import build_layout
from torch_frontend.context_parallel.attention import context_parallel_attention
from torch_frontend.context_parallel.mesh import rank_of
from torch_frontend.context_parallel.shards import shard_sequence

Array = np.ndarray
AXES = {1: ("cp",), 2: ("outer", "inner")}


class World(NamedTuple):
    """The number of ranks, the jobs that they run one after another, and how long they wait for each other.

    On "cpu" the ranks communicate by gloo. On "cuda" each has a GPU, and they communicate by NCCL.
    """

    name: str
    ranks: int
    jobs: dict[str, tuple[str, str, Any]]
    timeout: float = 60.0
    device: str = "cpu"


class Failed(NamedTuple):
    """The result of a job that raised."""

    text: str


class Case(NamedTuple):
    """One call over ranks, as plain data; inputs are drawn from ``seed``.

    Attributes:
        axes: of the mesh.
        length: positions of q, and of k and v; documents: their lengths in a packed row.
        options: other keywords of ``context_parallel_attention``; key_ranges as (constructor, its arguments).
        lse_gradient: whether the log-sum-exp has a gradient, too; without it, its cotangent is None.
        device: of the world that runs it.
        how: "eager", "compile", "compile in parts" (offsets of documents are no part of a graph), "checkpoint", or
            "kept": differentiated twice, as ``retain_graph=True`` allows.
    """

    axes: tuple[int, ...]
    strategy: str | None
    layout: str
    length: tuple[int, int]
    heads: tuple[int, int]
    documents: tuple[int, ...] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    sinks: bool = False
    dims: tuple[int, int] = (5, 3)
    batch: int = 2
    head_groups: int | None = None
    dtype: str = "float64"
    how: str = "eager"
    lse_gradient: bool = True
    seed: int = 0
    device: str = "cpu"

    @property
    def name(self) -> str:
        ranks = "x".join(map(str, self.axes))
        return f"{ranks} {self.strategy} {self.layout} {self.length} heads {self.heads} {self.documents or ''} " + (
            f"{dict(self.options)} sinks={self.sinks} groups={self.head_groups} {self.dtype} {self.how} {self.seed}"
        )


def ranges_of(case: Case) -> Array | None:
    """The key ranges of a case's whole row."""
    given = dict(case.options).get("key_ranges")
    return None if given is None else getattr(masks, given[0])(*given[1])


class Values(NamedTuple):
    """Whole rows: inputs of a case and the incoming gradients; float64 numbers that the case's dtype represents."""

    q: Array
    k: Array
    v: Array
    dout: Array
    dlse: Array
    sinks: Array


def values(case: Case) -> Values:
    """``[batch, length, heads, dim]`` and ``[batch, heads, length]``, the same in every process."""
    random = np.random.default_rng(case.seed)
    (q_len, k_len), (heads, kv_heads), (dim, value_dim) = case.length, case.heads, case.dims
    batch = 1 if case.documents else case.batch
    shapes = (
        *((batch, q_len, heads, dim), (batch, k_len, kv_heads, dim), (batch, k_len, kv_heads, value_dim)),
        *((batch, q_len, heads, value_dim), (batch, heads, q_len), (heads,)),
    )
    kind = getattr(torch, case.dtype)
    actual = [torch.from_numpy(random.normal(size=shape)).to(kind).double().numpy() for shape in shapes]
    actual[4] = random.normal(size=shapes[4])
    return Values(*actual)


@cache
def mesh_of(axes: tuple[int, ...], device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, axes, mesh_dim_names=AXES[len(axes)])


def run(case: Case) -> dict[str, Array]:
    """This rank's shards of out, lse, dq, dk, dv, and its share of dsinks, in the dtypes of the call."""
    mesh, given, kind = mesh_of(case.axes, case.device), values(case), getattr(torch, case.dtype)
    info = SeqInfo.from_lengths(case.documents) if case.documents else None

    def shard(array: Array, length: int, dim: int = 1, dtype: Any = kind) -> torch.Tensor:
        whole = torch.from_numpy(array).to(case.device, dtype)
        part = shard_sequence(whole, mesh, layout=case.layout, dim=dim, seq_info=info)
        outer, inner = (*case.axes, 1)[:2]
        documents = info.cu_seqlens_q.tolist() if info is not None and case.layout in ("zigzag", "documents") else None
        held = build_layout(case.layout, length, outer, inner, documents).position_count(rank_of(mesh))
        part.narrow(dim, held, part.shape[dim] - held).fill_(torch.nan)  # the content of places without a position
        return part

    q_len, k_len = case.length
    q, k, v = (shard(each, length) for each, length in zip(given[:3], (q_len, k_len, k_len)))
    learned = [each.requires_grad_() for each in (q, k, v)]
    sinks = None
    if case.sinks:
        sinks = torch.from_numpy(given.sinks).to(case.device, kind).requires_grad_()
        learned.append(sinks)

    def call(*given: Any, return_lse: bool = case.lse_gradient) -> Any:
        return context_parallel_attention(
            *given[:3],
            **{"mesh": mesh, "strategy": case.strategy, "layout": case.layout, "seq_info": info, "sinks": given[3]},
            **{"length": q_len if q_len == k_len else case.length, "head_groups": case.head_groups},
            **dict(case.options) | {"key_ranges": ranges_of(case)},
            return_lse=return_lse,
        )

    called = call
    if case.how.startswith("compile"):
        called = torch.compile(call, fullgraph=case.how == "compile", backend="aot_eager")
    elif case.how == "checkpoint":
        called = partial(checkpoint, call, use_reentrant=False)
    actual, cotangents = called(q, k, v, sinks), [shard(given.dout, q_len)]
    if case.lse_gradient:
        out, lse = actual
        cotangents.append(shard(given.dlse, q_len, 2, lse.dtype).reshape(lse.shape))  # packed: [heads, shard]
    else:
        out = actual
        with torch.no_grad():
            again, lse = call(q, k, v, sinks, return_lse=True)
        # On a GPU another kernel may be the fastest one for a call without gradients.
        assert case.device == "cuda" or torch.equal(out, again)
    differentiate = partial(torch.autograd.grad, [out, lse][: len(cotangents)], learned, cotangents)
    before = differentiate(retain_graph=True) if case.how == "kept" else ()
    gradients = differentiate()
    assert not before or all(map(torch.equal, before, gradients))
    lse_rows = lse[None] if lse.dim() == 2 else lse
    names = ("out", "lse", "dq", "dk", "dv", "dsinks")
    return {name: as_numpy(each) for name, each in zip(names, (out, lse_rows, *gradients))}


def captured(case: Case) -> bool:
    """Whether a forward that is replayed from a CUDA graph gives the bits of an eager call, also on other inputs."""
    mesh, given = mesh_of(case.axes, case.device), values(case)
    whole = [torch.from_numpy(each).to(case.device, getattr(torch, case.dtype)) for each in given[:3]]
    shards = [shard_sequence(each, mesh, layout=case.layout) for each in whole]
    where = {"mesh": mesh, "strategy": case.strategy, "layout": case.layout, "length": case.length[0]}

    def call() -> torch.Tensor:
        return context_parallel_attention(*shards, **where, **dict(case.options))

    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        dist.barrier()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call()
        for each in shards:
            each.mul_(0.5)
        graph.replay()
        return torch.equal(out, call())


def as_numpy(tensor: torch.Tensor) -> Array:
    """The values of a tensor; bfloat16 as float32."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _work(world: World, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(world.device == "cpu")  # also fills uninitialised memory with NaN
    if world.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if world.device == "cuda" else "gloo",
        init_method=f"file://{folder / world.name}.store",
        rank=rank,
        world_size=world.ranks,
        timeout=timedelta(seconds=world.timeout),
    )
    results: dict[str, Any] = {}
    for name, (module, function, arguments) in world.jobs.items():
        try:
            job = getattr(importlib.import_module(module), function)
            results[name] = job(*arguments)
        except Exception:
            results[name] = Failed(traceback.format_exc())
            break
    (folder / f"{world.name}.{rank}.pickle").write_bytes(pickle.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # does not wait for ranks that may be gone


def main(folder: Path) -> None:
    worlds = pickle.loads((folder / "worlds.pickle").read_bytes())
    for name in {module for world in worlds for module, _, _ in world.jobs.values()}:
        importlib.import_module(name)  # before the fork, so only once
    context = multiprocessing.get_context("fork")
    started = [
        context.Process(target=_work, args=(world, rank, folder)) for world in worlds for rank in range(world.ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()


def in_ranks(worlds: list[World], folder: Path, seconds: float) -> dict[str, list[dict[str, Any]]]:
    """Runs worlds in separate processes: the results of every rank of each; the results so far of a rank that died."""
    (folder / "worlds.pickle").write_bytes(pickle.dumps(worlds))
    here = Path(__file__).parent
    paths = [str(here.parents[1]), str(here), *(path for path in sys.path if path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if all(world.device == "cpu" for world in worlds):
        env["CUDA_VISIBLE_DEVICES"] = ""
    program = f"import context_torch_worker, pathlib; context_torch_worker.main(pathlib.Path({str(folder)!r}))"
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [sys.executable, "-c", program], env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            running.wait(seconds)
        finally:
            if running.poll() is None:
                os.killpg(running.pid, signal.SIGKILL)  # and its ranks
    assert running.returncode == 0, (folder / "log").read_text()[-3000:]
    files = {world.name: [folder / f"{world.name}.{rank}.pickle" for rank in range(world.ranks)] for world in worlds}
    return {
        name: [pickle.loads(file.read_bytes()) if file.exists() else {} for file in each]
        for name, each in files.items()
    }


def once(worlds: list[World], name: str, factory: Any, seconds: float) -> tuple[list[World], dict[str, Any]]:
    """Runs ``in_ranks`` once for all of pytest's processes, if there are several: the others wait for the first.

    Returns:
        (the worlds as the first process requested them, their results).
    """
    root = factory.getbasetemp()
    folder = (root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root) / f"ranks-of-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done.pickle"
        if not done.exists():
            done.write_bytes(pickle.dumps((worlds, in_ranks(worlds, folder, seconds))))
        return tuple(pickle.loads(done.read_bytes()))
