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
from typing import Any

import jax
import torch

from attn_core import NoBackendError, Target, backends, select
from attn_core.call.masks import as_called
from attn_core.cli.bench import speed_table
from attn_core.cli.bench_jax import JAX_NN, JAX_NN_CUDNN, caller, has_jax_nn
from attn_core.cli.bench_timing import measure
from attn_core.cli.frameworks import devices_of
from attn_core.selection.random_calls import random_calls
from attn_core.selection.sweep import SweepCase
from benchmarks.measure import environment

ROUNDS = 5
RESULTS = Path(__file__).parent / "results" / "jax-calls-h200.json"

Entry = dict[str, Any]


def entry_of(case: SweepCase, training: bool, target: Target) -> Entry | None:
    """Returns the microseconds of a call by candidate; None if jax.nn or no backend of ours can run it."""
    spec = replace(as_called(case.spec), needs_backward=training)
    if not has_jax_nn(spec):
        return None
    try:
        chosen = select(spec, target).backend or ""
    except NoBackendError:
        return None
    names = [chosen, JAX_NN, *([JAX_NN_CUDNN] if target.kind == "cuda" else [])]
    # Tensors of torch compare the results, on the CPU.
    timing = measure(caller(case, spec, names), names, ROUNDS, torch.device("cpu"))
    return {
        "call": case.name,
        "direction": "training" if training else "forward",
        "backend": chosen,
        "microseconds": {name: entry["microseconds"] for name, entry in timing.entries.items() if "median" in entry},
        "failed": {name: entry["failed"] for name, entry in timing.entries.items() if "failed" in entry},
        "differences": {name: entry.get("difference") for name, entry in timing.entries.items()},
    }


def summary(entries: list[Entry]) -> str:
    """Returns a Markdown table: how many times as fast automatic choice is as each implementation of jax.nn."""
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for rival in (JAX_NN, JAX_NN_CUDNN):
        for direction in ("forward", "training"):
            for entry in entries:
                times = {name: min(rounds) for name, rounds in entry["microseconds"].items()}
                if entry["direction"] == direction and rival in times and entry["backend"] in times:
                    pair = times[rival] / times[entry["backend"]], f"{entry['call']}: {entry['backend']}"
                    ratios.setdefault((rival, direction), []).append(pair)
    return "\n".join(speed_table(ratios))


def section() -> str:
    """Returns the stored results as a Markdown section of docs/explanation/performance.md."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    versions = stored["environment"]["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch", "nvidia-cudnn-cu13"))
    head = f"{stored['device']}, {stored['environment']['date']}, {named}, calls of seed {stored['seed']}."
    return f"{head}\n\n{summary(stored['calls'])}"


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
