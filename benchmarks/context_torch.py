"""Measures context parallelism in torch on several GPUs of one host, in one process per GPU that torchrun starts.

torchrun --nproc-per-node 2 -m benchmarks.context_torch --json part.json
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_frontend
from benchmarks.context_shapes import (
    CANDIDATES,
    CASES,
    CHECKED,
    DIM,
    HEADS,
    KV_HEADS,
    LONG,
    MORE,
    REST,
    RESULTS,
    ROUNDS,
    SHARDS,
    Shape,
    calls_of,
    write_measures,
)
from benchmarks.hopper_group import take_turns
from benchmarks.measure import environment
from torch_frontend.context_parallel.attention import context_parallel_attention, explain_context_parallel
from torch_frontend.context_parallel.exchange import messages
from torch_frontend.context_parallel.shards import shard_sequence, unshard_sequence

Run = Callable[[], Any]


def main(arguments: list[str] | None = None) -> None:
    """Measures on all ranks; rank 0 writes the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    parser.add_argument("--shards", type=int, nargs="+", default=list(SHARDS))
    parser.add_argument("--only", nargs="+", default=["errors", "speed", "long"], choices=(*MEASURES,))
    parser.add_argument("--stop-after", type=int, default=300, help="seconds until every rank prints its stack")
    options = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    measured: dict[str, Any] = {"framework": "torch", "world": mesh.size(), "environment": environment()}
    faulthandler.dump_traceback_later(options.stop_after, exit=True)
    requested = {name: MEASURES[name](mesh, options.shards) for name in options.only}
    measures = {name: [partial(guarded, *each) for each in of_name] for name, of_name in requested.items()}
    write_measures(measured, measures, options.json if dist.get_rank() == 0 else None)
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    dist.destroy_process_group()


Measures = Iterable[tuple[dict[str, int], Callable[[], Any]]]
"""For each measurement, a description of it and the function that runs it."""


def guarded(about: dict[str, int], measure: Callable[[], Any]) -> Any:
    """Returns the result of a measurement, or its error; frees the memory."""
    try:
        result = measure()
    except Exception as error:
        result = {**about, "error": f"{type(error).__name__}: {error}"}
        if dist.get_rank() == 0:
            print(result, flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    return result


def row(tokens: int, *heads: int, seed: int = 0) -> list[torch.Tensor]:
    """Returns tensors ``[1, tokens, heads, DIM]``, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, tokens, n, DIM, generator=generator, device="cuda", dtype=torch.bfloat16) for n in heads]


def speed(mesh: DeviceMesh, shard: int) -> dict[str, Any]:
    """Measures the slowest rank's seconds of every candidate in every round, forward and forward + backward."""
    shape = Shape(shard, mesh.size())
    measured: dict[str, Any] = {"shard": shard, "tokens": shape.tokens, "seconds": {}, "memory": {}, "notes": {}}
    whole = row(shape.tokens, HEADS, KV_HEADS, KV_HEADS, HEADS)
    for training in (False, True):
        word = "forward + backward" if training else "forward"
        runs, notes = _runs(mesh, whole, training)
        measured["notes"][word] = notes
        measured["memory"][word] = {name: _memory(run) for name, run in runs.items()}
        measured["seconds"][word] = _rounds(runs, calls_of(shape, training=training))
        del runs
    return measured


def peers(mesh: DeviceMesh, shard: int) -> dict[str, Any]:
    """Measures torch's own context parallelism in the same way."""
    shape = Shape(shard, mesh.size())
    measured: dict[str, Any] = {"shard": shard, "tokens": shape.tokens, "seconds": {}}
    whole = row(shape.tokens, HEADS, KV_HEADS, KV_HEADS, HEADS)
    for training in (False, True):
        word = "forward + backward" if training else "forward"
        with _peer(mesh, whole, training) as runs:
            measured["seconds"][word] = _rounds(runs, calls_of(shape, training=training))
    return measured


def _runs(mesh: DeviceMesh, whole: list[torch.Tensor], training: bool) -> tuple[dict[str, Run], dict[str, str]]:
    runs: dict[str, Run] = {"one GPU": _call(torch_frontend.attention, whole, training)}
    notes = {"one GPU": torch_frontend.explain(*whole[:3], causal=True, needs_backward=training).backend or ""}
    for name, keywords in CANDIDATES.items():
        parts = [shard_sequence(tensor, mesh, layout=keywords["layout"]) for tensor in whole]
        attend = partial(context_parallel_attention, mesh=mesh, **keywords)
        run = _call(attend, parts, training)
        try:
            run()
        except Exception as error:
            notes[name] = f"not run: {type(error).__name__}: {error}"
            continue
        runs[name] = run
        if "head_groups" not in keywords:
            runs[f"{name}, nothing sent"] = partial(_silent, run, _Silent())
    tensors = [shard_sequence(tensor, mesh).requires_grad_(training) for tensor in whole[:3]]
    notes["choice"] = str(explain_context_parallel(*tensors, mesh=mesh, causal=True))
    return runs, notes


def _call(attend: Callable[..., Any], tensors: list[torch.Tensor], training: bool) -> Run:
    q, k, v, dout = tensors
    if not training:

        def forward() -> Any:
            with torch.no_grad():
                return attend(q, k, v, causal=True)

        return forward
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*leaves, causal=True), leaves, dout)


class _Silent:
    """Collectives that send nothing, so that only the time of a call's own work remains."""

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, int], list[torch.Tensor]] = {}

    def all_gather_into_tensor_coalesced(self, parts: list[torch.Tensor], size: int, name: str) -> list[torch.Tensor]:
        """Returns realistic numbers, made once. On zeros, a GPU draws less power and is faster."""
        key = size, parts[0].numel()
        if key not in self._gathered:
            self._gathered[key] = [part.repeat(size) for part in parts]
        return self._gathered[key]

    def all_to_all_single(self, tensor: torch.Tensor, sizes: list[int], given: list[int], name: str) -> torch.Tensor:
        return tensor

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _silent(run: Run, silent: _Silent) -> None:
    real: Any = messages.collectives
    messages.collectives = silent  # type: ignore[assignment]
    try:
        run()
    finally:
        messages.collectives = real


@contextmanager
def _peer(mesh: DeviceMesh, whole: list[torch.Tensor], training: bool) -> Iterator[dict[str, Run]]:
    """Prepares torch's own context parallelism on cuDNN's kernel, with both of its exchanges."""
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    group = HEADS // KV_HEADS
    expanded = [tensor.repeat_interleave(group, 2) if at in (1, 2) else tensor for at, tensor in enumerate(whole)]
    buffers = [tensor.transpose(1, 2).contiguous() for tensor in expanded]  # [1, heads, tokens, DIM]
    runs: dict[str, Run] = {}
    with (
        sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4),
    ):
        q, k, v, dout = (buffer.detach().clone() for buffer in buffers)
        leaves = [tensor.requires_grad_(training) for tensor in (q, k, v)]

        def run(way: str) -> Any:
            _attention.set_rotate_method(way)
            # Looked up at every call, because torch replaces the function inside the block.
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
            return torch.autograd.grad(out, leaves, dout) if training else out

        for way in ("allgather", "alltoall"):
            try:
                run(way)
                runs[f"torch context_parallel, {way}"] = partial(run, way)
            except Exception as error:
                if dist.get_rank() == 0:
                    print(f"torch context_parallel, {way}: not run: {type(error).__name__}: {error}", flush=True)
        yield runs


def _rounds(runs: dict[str, Run], calls: int) -> dict[str, list[float]]:
    """Returns the slowest rank's seconds per call; every rank takes the same turns."""
    for run in runs.values():
        for _ in range(2):
            run()
    turns = {name: partial(_timed, run) for name, run in runs.items()}
    return take_turns(turns, calls=calls, rounds=ROUNDS, rest=REST)


def _timed(run: Run, calls: int) -> float:
    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    seconds = torch.tensor((time.perf_counter() - began) / calls, device="cuda")
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _memory(run: Run) -> int:
    """Returns the peak bytes of a call beyond its inputs."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def errors(mesh: DeviceMesh) -> dict[str, Any]:
    """Measures mean and largest errors against float64, of several GPUs and of one GPU with the same backend."""
    tokens = CHECKED * mesh.size() + MORE
    whole = row(tokens, HEADS, KV_HEADS, KV_HEADS, HEADS, seed=1)
    measured = []
    for options in CASES:
        exactly = partial(torch_frontend.attention, backend="math", **options)
        exact = _results(exactly, [tensor.double() for tensor in whole])
        for name, keywords in CANDIDATES.items():
            parts = [shard_sequence(tensor, mesh, layout=keywords["layout"]) for tensor in whole[:3]]
            tensors = [part.requires_grad_() for part in parts]
            call = explain_context_parallel(*tensors, mesh=mesh, length=tokens, **keywords, **options).call
            chosen = tuple(dict.fromkeys(name for _, name in call.backends))
            several = _several(mesh, whole, tokens, {**keywords, **options, "backend": chosen})
            one = _results(partial(torch_frontend.attention, backend=chosen, **options), whole)
            compared = {
                result: {"several": _error(several[result], right), "one": _error(one[result], right)}
                for result, right in exact.items()
            }
            measured.append({"case": str(options), "candidate": name, "backend": " ".join(chosen), "errors": compared})
    return {"tokens": tokens, "found": measured}


def _results(attend: Callable[..., Any], tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    *leaves, dout = (tensor.clone().requires_grad_() for tensor in tensors)
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    return dict(zip(RESULTS, (out.detach(), *gradients), strict=True))


def _several(
    mesh: DeviceMesh, whole: list[torch.Tensor], tokens: int, keywords: dict[str, Any]
) -> dict[str, torch.Tensor]:
    layout = keywords["layout"]
    parts = [shard_sequence(tensor, mesh, layout=layout) for tensor in whole]
    measured = _results(partial(context_parallel_attention, mesh=mesh, length=tokens, **keywords), parts)
    return {result: unshard_sequence(part, mesh, length=tokens, layout=layout) for result, part in measured.items()}


def _error(measured: torch.Tensor, right: torch.Tensor) -> dict[str, float]:
    apart = (measured.double() - right).abs()
    return {"mean": float(apart.mean()), "max": float(apart.max())}


def long_forward(mesh: DeviceMesh, tokens: int) -> dict[str, Any]:
    """Measures one forward of a long row: seconds, bytes, and the error of a late query against float64."""
    shard = tokens // mesh.size()
    generator = torch.Generator("cuda").manual_seed(dist.get_rank())
    q, k, v = (
        torch.randn(1, shard, heads, DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )

    def run() -> torch.Tensor:
        with torch.no_grad():
            return context_parallel_attention(q, k, v, mesh=mesh, strategy="ring", causal=True)

    out = run()
    everyone = [unshard_sequence(tensor[:, :, :1].contiguous(), mesh, length=tokens) for tensor in (q, k, v, out)]
    at = tokens - 5
    scores = (everyone[0][0, at, 0].double() @ everyone[1][0, : at + 1, 0].double().T) / DIM**0.5
    right = scores.softmax(0) @ everyone[2][0, : at + 1, 0].double()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds, memory = time.perf_counter() - began, torch.cuda.max_memory_allocated() - before
    inputs = sum(tensor.numel() * 2 for tensor in (q, k, v))
    return {
        "tokens": tokens,
        "seconds": seconds,
        "bytes beyond inputs": memory,
        "bytes of inputs": inputs,
        "largest error of a row": float((everyone[3][0, at, 0].double() - right).abs().max()),
    }


MEASURES: dict[str, Callable[[DeviceMesh, list[int]], Measures]] = {
    "errors": lambda mesh, shards: [({}, partial(errors, mesh))],
    "speed": lambda mesh, shards: [({"shard": shard}, partial(speed, mesh, shard)) for shard in shards],
    "peers": lambda mesh, shards: [({"shard": shard}, partial(peers, mesh, shard)) for shard in shards],
    "long": lambda mesh, shards: [({"tokens": tokens}, partial(long_forward, mesh, tokens)) for tokens in LONG],
}
"""The measurements by name."""


if __name__ == "__main__":
    main()
