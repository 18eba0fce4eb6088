"""Profiles a row's calls on every rank with torch's profiler: kernels by kind, gaps between kernels, and host time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.context_row_shapes import Row

CALLS = 5
LINES = 25
KINDS = (
    ("exchange", ("nccl", "gloo", "c10d")),
    ("attention", ("flash", "attention", "fmha", "cudnn", "attn")),
    ("copy", ("copy", "memcpy", "memset", "cat", "index", "gather", "scatter", "fill")),
)
"""Kinds of kernels, by words in their names; the first that fits."""


class Span(NamedTuple):
    """A kernel, or an operation on a CPU: microseconds."""

    name: str
    start: float
    end: float


def profile(runs: dict[str, Callable[[], Any]], row: Row, folder: Path, mesh: Any) -> None:
    """Writes ``<row>-rank<r>.txt`` into the folder, with each direction's summary and torch's table."""
    on_gpu = mesh.device_type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    parts = [f"{row.name}: {row.words}; rank {dist.get_rank()} of {dist.get_world_size()}; {CALLS} calls"]
    for direction, run in runs.items():
        for _ in range(3):
            run()
        dist.barrier()
        with torch_profile(activities=activities) as recorded:
            began = time.perf_counter()
            for _ in range(CALLS):
                run()
            host = time.perf_counter() - began
            if on_gpu:
                torch.cuda.synchronize()
        table = recorded.key_averages().table(
            sort_by="self_device_time_total" if on_gpu else "self_cpu_time_total",
            row_limit=LINES,
            max_name_column_width=70,
        )
        parts += [f"## {direction}", summary(spans(recorded, on_gpu), host * 1e6, CALLS), table]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row.name.replace(' ', '-')}-rank{dist.get_rank()}.txt"
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"wrote {path}", flush=True)


def spans(recorded: Any, on_gpu: bool) -> list[Span]:
    """Returns the kernels of a profile, or on a CPU the operations that no other operation calls."""
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in recorded.events() if event.device_type == kind]
    if not on_gpu:
        events = [event for event in events if event.cpu_parent is None]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in events]


def summary(kernels: list[Span], host: float, calls: int) -> str:
    """Returns the microseconds of a call by kind of kernel, with gaps and the host's time, one on each line.

    A gap is time in which no kernel runs. Kernels of two kinds may run at once, so the kinds may add up to more than
    the time in which any kernel runs.
    """
    sums = dict.fromkeys((*(kind for kind, _ in KINDS), "other"), 0.0)
    counts = dict.fromkeys(sums, 0)
    for each in kernels:
        kind = next((name for name, words in KINDS if any(word in each.name.lower() for word in words)), "other")
        sums[kind] += each.end - each.start
        counts[kind] += 1
    busy, end = 0.0, float("-inf")
    for each in sorted(kernels, key=lambda span: span.start):
        busy += max(0.0, each.end - max(each.start, end))
        end = max(end, each.end)
    whole = end - min((each.start for each in kernels), default=end) if kernels else 0.0
    lines = [f"{kind}: {sums[kind] / calls:.1f} us, {counts[kind] / calls:.1f} kernels" for kind in sums]
    lines += [f"gaps: {(whole - busy) / calls:.1f} us", f"first to last kernel: {whole / calls:.1f} us"]
    return "\n".join([*lines, f"host, to launch: {host / calls:.1f} us"])
