"""One rank of ``benchmarks.context_rows`` in torch: measures rows, or profiles one. Started by torchrun."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_frontend
from attn_core import SeqInfo
from benchmarks.context_row_profile import profile
from benchmarks.context_row_report import CAPTURED, CHOSEN, DIRECTIONS, ONE, described
from benchmarks.context_row_shapes import REST, Row, rows_of
from benchmarks.hopper_group import take_turns
from torch_frontend.context_parallel.attention import (
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
)

ROUNDS = 4
OTHER_ROUNDS = 2
TURN = 0.05
"""The seconds of a turn, about: a GPU's clock is higher for a while after a wait."""
Tensor = torch.Tensor
Run = Callable[[], Any]


def main(task: dict[str, Any]) -> None:
    """Measures the rows of a task on this rank; rank 0 writes the result."""
    on_gpu = task["device"] == "cuda"
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=4))
    if on_gpu:
        torch.cuda.set_device(dist.get_node_local_rank())
    mesh = init_device_mesh(task["device"], (dist.get_world_size(),), mesh_dim_names=("cp",))
    rows = rows_of(task["seed"], [task["profile"]] if task["profile"] else task["rows"], small=not on_gpu)
    if task["profile"]:
        shares = Shares(mesh, rows[0])
        runs = {each: shares.run(*shares.chosen(each), each) for each in DIRECTIONS}
        profile(runs, rows[0], Path(task["folder"]), mesh)
    else:
        _measure(mesh, rows, task)
    dist.barrier()
    dist.destroy_process_group()


class Shares:
    """A row's tensors on this rank, and calls of it in every way."""

    def __init__(self, mesh: DeviceMesh, row: Row) -> None:
        self.mesh, self.row = mesh, row
        on_gpu = mesh.device_type == "cuda"
        self.dtype = torch.bfloat16 if on_gpu else torch.float32
        generator = torch.Generator(mesh.device_type).manual_seed(0)
        self.info = SeqInfo.from_lengths(row.lengths) if row.lengths else None
        self.whole = [
            torch.randn(1, row.tokens, heads, row.head_dim, generator=generator, device=mesh.device_type).to(self.dtype)
            for heads in (row.heads, row.kv_heads, row.kv_heads, row.heads)
        ]

    def one(self, direction: str) -> Run:
        """Returns a call of the whole row on one rank."""
        info = None
        if self.info is not None:
            device = self.mesh.device_type
            info = SeqInfo.from_lengths(self.row.lengths, array=lambda each: torch.tensor(each, device=device))
        return self._call(torch_frontend.attention, self.whole, direction, seq_info=info)

    def run(self, strategy: str, layout: str, direction: str) -> Run:
        """Returns a call of this rank's shards in one way."""
        placement = self._placement(strategy, layout)
        return self._call(context_parallel_attention, self._shards(layout), direction, **placement)

    def explained(self, strategy: str, layout: str, direction: str) -> Any:
        """Returns the explanation of a way. Raises the error of a way that cannot run."""
        q, k, v, _ = self._shards(layout)
        options = {**self._placement(strategy, layout), **self.row.options}
        return explain_context_parallel(q, k, v, needs_backward=direction == DIRECTIONS[1], **options)

    def estimates(self, direction: str) -> tuple[dict[str, float], dict[str, str]]:
        """Returns (the cost model's seconds of each way, why the others are refused)."""
        seconds, refused = {}, {}
        for strategy, layout in self.row.ways:
            name = f"{strategy}, {layout}"
            try:
                cost = self.explained(strategy, layout, direction).choice.estimate
            except Exception as error:
                refused[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
                continue
            seconds[name] = cost.both if direction == DIRECTIONS[1] else cost.forward.seconds
        return seconds, refused

    def chosen(self, direction: str) -> tuple[str, str]:
        """Returns (strategy, layout) of the shortest estimate."""
        seconds, _ = self.estimates(direction)
        return _way(min(seconds, key=lambda name: seconds[name]))

    def _placement(self, strategy: str, layout: str) -> dict[str, Any]:
        length = None if self.row.lengths else self.row.tokens
        return {"mesh": self.mesh, "strategy": strategy, "layout": layout, "length": length, "seq_info": self.info}

    def _shards(self, layout: str) -> list[Tensor]:
        return [shard_sequence(each, self.mesh, layout=layout, seq_info=self.info) for each in self.whole]

    def _call(self, attend: Callable[..., Any], tensors: list[Tensor], direction: str, **more: Any) -> Run:
        q, k, v, dout = tensors
        options = {**self.row.options, **more}
        if direction == DIRECTIONS[0]:

            def forward() -> Any:
                with torch.no_grad():
                    return attend(q, k, v, **options)

            return forward
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
        return lambda: torch.autograd.grad(attend(*leaves, **options), leaves, dout)


def _way(name: str) -> tuple[str, str]:
    strategy, _, layout = name.partition(", ")
    return strategy, layout


def _measure(mesh: DeviceMesh, rows: tuple[Row, ...], task: dict[str, Any]) -> None:
    """Measures each row's chosen way and one rank first, and then the other ways, until the time is over."""
    measured: list[dict[str, Any]] = []
    # The other ways take longer than this, but every row needs its first figures.
    first_ends = time.time() + 0.7 * (task["ends"] - time.time())
    for row in rows:
        entry: dict[str, Any] = {**described(row), "measured": {}, "error": ""}
        measured.append(entry)
        if not _time_left(mesh, first_ends):
            entry["error"] = "not measured: out of time"
            continue
        try:
            shares = Shares(mesh, row)
            entry["measured"] = {direction: _chosen_and_one(shares, direction) for direction in DIRECTIONS}
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            entry["measured"] = {}
        _free()
        _write(measured, mesh, task)
    for row, entry in zip(rows, measured, strict=True):
        for direction, result in entry["measured"].items():
            if _time_left(mesh, task["ends"]):
                _others(Shares(mesh, row), direction, result, task["ends"])
                _free()
                _write(measured, mesh, task)


def _write(measured: list[dict[str, Any]], mesh: DeviceMesh, task: dict[str, Any]) -> None:
    """Writes what was measured so far, because the launcher may end this process."""
    if dist.get_rank() == 0:
        on_gpu = mesh.device_type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else "CPU, tiny rows: a trial of the program, no measurement"
        result = {"rows": measured, "device": device, "dtype": "bfloat16" if on_gpu else "float32"}
        Path(task["out"]).write_text(json.dumps(result), encoding="utf-8")


def _chosen_and_one(shares: Shares, direction: str) -> dict[str, Any]:
    estimates, refused = shares.estimates(direction)
    name = min(estimates, key=lambda each: estimates[each])
    runs = {ONE: shares.one(direction), CHOSEN: shares.run(*_way(name), direction)}
    calls = {each: _warm(run, shares.mesh) for each, run in runs.items()}
    memory = {each: _memory(run, shares.mesh) for each, run in runs.items()}
    replay, error = _captured(runs[CHOSEN], shares.mesh)
    if replay is not None:
        runs[CAPTURED] = replay
    seconds = _turns(runs, calls[CHOSEN], ROUNDS, shares.mesh)
    backends = sorted({each for _, each in shares.explained(*_way(name), direction).call.backends})
    return {
        **{"chosen": name, "estimates": estimates, "refused": refused, "seconds": seconds, "memory": memory},
        **{"backends": backends, "others": {}, "not captured": error},
    }


def _others(shares: Shares, direction: str, result: dict[str, Any], ends: float) -> None:
    """Adds the seconds of the chosen way and of every other way that can run, in turns of their own."""
    runs: dict[str, Run] = {}
    calls = 2
    for name in result["estimates"]:
        if not _time_left(shares.mesh, ends):
            break
        try:
            run = shares.run(*_way(name), direction)
            calls = _warm(run, shares.mesh)
        except Exception as error:  # every rank raises it
            result["refused"][name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        runs[CHOSEN if name == result["chosen"] else name] = run
    result["others"] = _turns(runs, calls, OTHER_ROUNDS, shares.mesh)


def _captured(run: Run, mesh: DeviceMesh) -> tuple[Run | None, str]:
    """Captures a call in a CUDA graph; returns (its replay, ""), or (None, why) on every rank if one cannot."""
    if mesh.device_type != "cuda":
        return None, "needs a GPU"
    graph, error = torch.cuda.CUDAGraph(), ""
    _synchronise(mesh)
    dist.barrier()
    try:
        # Other threads, such as NCCL's watchdog, call CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = run()
    except Exception as failure:
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0][:200]}"
    if _slowest(float(bool(error)), mesh):
        return None, error or "another rank could not"

    def replay() -> Any:
        graph.replay()
        return results

    return replay, ""


def _warm(run: Run, mesh: DeviceMesh) -> int:
    """Runs a call three times; returns the number of calls that fill a turn, the same on every rank."""
    for _ in range(2):
        run()
    return max(2, min(32, int(TURN / max(_timed(run, mesh, 1), 1e-6))))


def _turns(runs: dict[str, Run], calls: int, rounds: int, mesh: DeviceMesh) -> dict[str, list[float]]:
    turns = {name: partial(_timed, run, mesh) for name, run in runs.items()}
    return take_turns(turns, calls=calls, rounds=rounds, rest=REST)


def _timed(run: Run, mesh: DeviceMesh, calls: int) -> float:
    """Returns the slowest rank's seconds per call."""
    run()
    _synchronise(mesh)
    dist.barrier()
    _synchronise(mesh)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronise(mesh)
    return _slowest((time.perf_counter() - began) / calls, mesh)


def _slowest(number: float, mesh: DeviceMesh) -> float:
    shared = torch.tensor(number, dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return float(shared)


def _time_left(mesh: DeviceMesh, ends: float) -> bool:
    """Returns whether there is time; the same on every rank."""
    return _slowest(time.time(), mesh) < ends


def _memory(run: Run, mesh: DeviceMesh) -> float | None:
    """Returns the peak bytes of a call beyond its inputs, on the rank that needs most; None on a CPU."""
    if mesh.device_type != "cuda":
        return None
    run()
    _synchronise(mesh)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    _synchronise(mesh)
    return _slowest(float(torch.cuda.max_memory_allocated() - before), mesh)


def _synchronise(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
