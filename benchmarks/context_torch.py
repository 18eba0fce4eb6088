"""One rank of ``benchmarks.context`` in torch. Started by torchrun."""

from __future__ import annotations

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
from benchmarks.context import REST, Row, described, rows_of, store, way_of
from benchmarks.measure import reason, release, settle, take_turns
from benchmarks.tables import CHOSEN, DIRECTIONS, ONE
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
    _measure(mesh, rows_of(task["seed"], task["rows"], small=not on_gpu), task)
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
        return self._call(
            context_parallel_attention, self._shards(layout), direction, **self._placement(strategy, layout)
        )

    def explained(self, strategy: str, layout: str, direction: str) -> Any:
        """Returns the explanation of a way. Raises the error of a way that cannot run."""
        q, k, v, _ = self._shards(layout)
        options = {**self._placement(strategy, layout), **self.row.options}
        return explain_context_parallel(q, k, v, needs_backward=direction == DIRECTIONS[1], **options)

    def estimates(self, direction: str) -> tuple[dict[str, float], dict[str, str]]:
        """Returns (the seconds by which each way is compared, why the others are refused)."""
        seconds, refused = {}, {}
        for strategy, layout in self.row.ways:
            name = f"{strategy}, {layout}"
            try:
                cost = self.explained(strategy, layout, direction).choice.cost
            except Exception as error:
                refused[name] = (str(error).splitlines() or [type(error).__name__])[0][:200]
                continue
            seconds[name] = cost.order[0]
        return seconds, refused

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


def _measure(mesh: DeviceMesh, rows: tuple[Row, ...], task: dict[str, Any]) -> None:
    """Measures each row's chosen way and one rank first, and then the other ways, until the time is over."""
    measured: list[dict[str, Any]] = []
    # The other ways take longer than this, but every row needs its first figures.
    first_ends = time.time() + 0.7 * (task["ends"] - time.time())
    for row in rows:
        entry = described(row)
        measured.append(entry)
        if not _time_left(mesh, first_ends):
            entry["error"] = "not measured: out of time"
            continue
        try:
            shares = Shares(mesh, row)
            entry["measured"] = {direction: _chosen_and_one(shares, direction) for direction in DIRECTIONS}
        except Exception as error:
            entry["error"], entry["measured"] = reason(error), {}
        release()
        _write(measured, mesh, task)
    for row, entry in zip(rows, measured, strict=True):
        for direction, result in entry["measured"].items():
            if _time_left(mesh, task["ends"]):
                _others(Shares(mesh, row), direction, result, task["ends"])
                release()
                _write(measured, mesh, task)


def _write(measured: list[dict[str, Any]], mesh: DeviceMesh, task: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        on_gpu = mesh.device_type == "cuda"
        device = torch.cuda.get_device_name() if on_gpu else "CPU, tiny rows: a trial of the program, no measurement"
        store(task, measured, device)


def _chosen_and_one(shares: Shares, direction: str) -> dict[str, Any]:
    estimates, refused = shares.estimates(direction)
    name = min(estimates, key=lambda each: estimates[each])
    runs = {ONE: shares.one(direction), CHOSEN: shares.run(*way_of(name), direction)}
    calls = {each: _warm(run, shares.mesh) for each, run in runs.items()}
    memory = {each: _memory(run, shares.mesh) for each, run in runs.items()}
    seconds = _turns(runs, calls[CHOSEN], ROUNDS, shares.mesh)
    found = {"chosen": name, "estimates": estimates, "refused": refused, "seconds": seconds, "memory": memory}
    found["backends"] = sorted({each for _, each in shares.explained(*way_of(name), direction).call.backends})
    row = shares.row
    if shares.mesh.device_type == "cuda" and not (row.lengths or row.window or row.softcap or row.tokens % 16):
        found["seconds"] |= _peers(shares, direction)
    return {**found, "others": {}}


def _peers(shares: Shares, direction: str) -> dict[str, list[float]]:
    """Returns the seconds of torch's own context parallelism on cuDNN's kernel, by its exchange.

    It needs the whole row in a block of its own, so it takes turns in rounds of its own.
    """
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group, training = shares.row.heads // shares.row.kv_heads, direction == DIRECTIONS[1]
    q, k, v, dout = shares.whole
    expanded = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), dout)
    buffers = [tensor.transpose(1, 2).contiguous() for tensor in expanded]  # [1, heads, tokens, head_dim]
    block = context_parallel(shares.mesh, buffers=buffers, buffer_seq_dims=[2] * 4)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), block:
        *leaves, gradient = (buffer.detach().clone() for buffer in buffers)
        leaves = [tensor.requires_grad_(training) for tensor in leaves]

        def run(exchange: str) -> Any:
            _attention.set_rotate_method(exchange)
            # Looked up at every call, because torch replaces the function inside the block.
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(out, leaves, gradient) if training else out

        runs: dict[str, Run] = {
            f"torch context_parallel, {exchange}": partial(run, exchange) for exchange in ("allgather", "alltoall")
        }
        try:
            calls = max(_warm(each, shares.mesh) for each in runs.values())
        except Exception as error:  # every rank raises it
            print(f"torch context_parallel: {reason(error)}", flush=True)
            return {}
        return _turns(runs, calls, ROUNDS, shares.mesh)


def _others(shares: Shares, direction: str, result: dict[str, Any], ends: float) -> None:
    """Adds the seconds of the chosen way and of every other way that can run, in turns of their own."""
    runs: dict[str, Run] = {}
    calls = 2
    for name in result["estimates"]:
        if not _time_left(shares.mesh, ends):
            break
        try:
            run = shares.run(*way_of(name), direction)
            calls = _warm(run, shares.mesh)
        except Exception as error:  # every rank raises it
            result["refused"][name] = reason(error)
            continue
        runs[CHOSEN if name == result["chosen"] else name] = run
    result["others"] = _turns(runs, calls, OTHER_ROUNDS, shares.mesh)


def _warm(run: Run, mesh: DeviceMesh) -> int:
    """Runs a call three times; returns the number of calls that fill a turn, the same on every rank."""
    for _ in range(2):
        run()
    return max(2, min(32, int(TURN / max(_timed(run, mesh, 1), 1e-6))))


def _turns(runs: dict[str, Run], calls: int, rounds: int, mesh: DeviceMesh) -> dict[str, list[float]]:
    turns = {name: partial(_timed, run, mesh, calls) for name, run in runs.items()}
    return take_turns(turns, rounds, REST)


def _timed(run: Run, mesh: DeviceMesh, calls: int) -> float:
    """Returns the slowest rank's seconds per call."""
    run()
    settle(None)
    dist.barrier()
    settle(None)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    settle(None)
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
    settle(None)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    settle(None)
    return _slowest(float(torch.cuda.max_memory_allocated() - before), mesh)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
