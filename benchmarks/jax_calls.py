"""Measures random calls in JAX under jit: automatic choice beside jax.nn.dot_product_attention, in XLA and in cuDNN.

python -m benchmarks.jax_calls --seed 3 --calls 40                # prints a line per call and a summary
python -m benchmarks.jax_calls --seconds 100 --json calls.json    # starts no new call after that time; writes the times

The calls are those of ``attn bench`` (attn_core/selection/random_calls.py) that jax.nn can express. The candidates take
turns. A time is the host's or the device's for a queue of calls, whichever is longer; the fastest round counts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jax
import torch

from attn_core import NoBackendError, Target, backends, select
from attn_core.cli.bench_jax import JAX_NN, JAX_NN_CUDNN, caller, has_jax_nn
from attn_core.cli.bench_timing import measure
from attn_core.cli.frameworks import devices_of
from attn_core.selection.random_calls import random_calls
from attn_core.selection.sweep import SweepCase
from benchmarks.measure import environment

ROUNDS = 5
GOAL = 0.95
"""The least speed of automatic choice as a multiple of jax.nn's."""

Entry = dict[str, Any]


def entry_of(case: SweepCase, training: bool, target: Target) -> Entry | None:
    """Returns the microseconds of a call by candidate; None if jax.nn or no backend of ours can run it."""
    spec = replace(case.spec, needs_backward=training)
    if not has_jax_nn(spec):
        return None
    try:
        chosen = select(spec, target).backend or ""
    except NoBackendError:
        return None
    names = [chosen, JAX_NN, *([JAX_NN_CUDNN] if target.kind == "cuda" else [])]
    # Tensors of torch compare the results, on the CPU.
    timing = measure(caller(case, spec), names, ROUNDS, torch.device("cpu"))
    return {
        "call": case.name,
        "direction": "training" if training else "forward",
        "backend": chosen,
        "microseconds": {name: entry["microseconds"] for name, entry in timing.entries.items() if "median" in entry},
        "failed": {name: entry["failed"] for name, entry in timing.entries.items() if "failed" in entry},
        "differences": {name: entry.get("difference") for name, entry in timing.entries.items()},
    }


def speeds(entries: list[Entry], rival: str) -> list[tuple[float, str]]:
    """Returns (how many times as fast automatic choice is, call) for the calls that both sides ran."""
    result = []
    for entry in entries:
        times = {name: min(rounds) for name, rounds in entry["microseconds"].items()}
        if rival in times and entry["backend"] in times:
            label = f"{entry['call']} ({entry['direction']}): {entry['backend']}"
            result.append((times[rival] / times[entry["backend"]], label))
    return result


def summary(entries: list[Entry]) -> str:
    """Returns a Markdown table: speed beside each implementation of jax.nn, by direction."""
    lines = ["| beside | direction | calls | geometric mean | below 0.95 | lowest | where |", "|---" * 7 + "|"]
    for rival in (JAX_NN, JAX_NN_CUDNN):
        for direction in ("forward", "training"):
            pairs = speeds([entry for entry in entries if entry["direction"] == direction], rival)
            if pairs:
                mean = geometric_mean(speed for speed, _ in pairs)
                slower, (lowest, where) = sum(speed < GOAL for speed, _ in pairs), min(pairs)
                row = f"{len(pairs)} | {mean:.2f} | {slower} | {lowest:.2f} | {where}"
                lines.append(f"| {rival} | {direction} | {row} |")
    return "\n".join(lines)


def main() -> None:
    """Measures the calls of a seed, prints the summary and writes the raw times if --json is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--calls", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", type=Path, default=None)
    parsed = parser.parse_args()
    target = Target.here("jax", devices_of("jax")[-1])
    kind, began, entries = backends.kind_of(target.device), time.perf_counter(), []
    for case in islice(random_calls(parsed.seed, kind), parsed.calls):
        for training in (False, True) if case.training else (False,):
            if time.perf_counter() - began > parsed.seconds:
                break
            entry = entry_of(case, training, target)
            if entry is None:
                continue
            entries.append(entry)
            shown = ", ".join(f"{name} {min(rounds):.0f}" for name, rounds in entry["microseconds"].items())
            print(f"{entry['call']} ({entry['direction']}), µs: {shown} {entry['failed'] or ''}", flush=True)
        jax.clear_caches()
        if parsed.json is not None:
            facts = {"environment": environment(), "device": _device_name(), "seed": parsed.seed}
            parsed.json.write_text(json.dumps({**facts, "calls": entries}, indent=1) + "\n", encoding="utf-8")
    print(summary(entries))


def _device_name() -> str:
    device = jax.devices()[0]
    return "cpu" if device.platform == "cpu" else str(device.device_kind)


if __name__ == "__main__":
    main()
