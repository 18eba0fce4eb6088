"""Trains the model over several ranks in both frameworks, and compares each with one rank: ``--ranks``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from examples.stages import Stages
from examples.training.spread import FAULT, FIRST, ONE, RANKS, SpreadRun

ROOT = Path(__file__).resolve().parents[2]
TORCH, JAX = "torch", "JAX"
CLOSE = {"float32": 1e-5, "bfloat16": 2e-4}
"""The largest difference of the first losses, relative to the loss."""
LATER = {"float32": 1e-4, "bfloat16": 3e-2}
"""The largest difference of all losses, in which rounding has accumulated."""
GRADIENTS_CLOSE = {"float32": 1e-4, "bfloat16": 1e-2}
"""The largest difference of AdamW's running means of gradients over the first steps."""


class RankError(RuntimeError):
    """The processes of a framework failed; the message is the end of their output."""


def compare(spread_run: SpreadRun, stages: Stages) -> dict[str, dict[str, Any]]:
    """Trains in torch and in JAX, on one rank and over all; returns plain data by framework.

    Raises:
        RankError: if a process failed.
    """
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(spread_run.spread.ranks), "-m"]
    commands = {TORCH: [*launched, "examples.training.torch_ranks"], JAX: ["examples.training.jax_ranks"]}
    with TemporaryDirectory() as name:
        folder = Path(name)
        spread_run.write(folder)
        results = {}
        for framework, command in commands.items():
            with stages.stage(f"training in {framework}: one rank, then {spread_run.spread.ranks}"):
                run(framework, [*command, name])
            path = folder / f"{framework.lower()}.json"
            results[framework] = json.loads(path.read_text(encoding="utf-8"))
    return results


def run(framework: str, command: list[str]) -> None:
    """Runs a module with its arguments until it ends.

    Raises:
        RankError: if it ends with an error.
    """
    defaults = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**defaults, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RankError(f"{framework} ended with {process.returncode}:\n{process.stdout[-4000:]}")


def apart(run: dict[str, Any], other: dict[str, Any], key: str = "losses") -> np.ndarray:
    """Returns the difference of two runs at every step that both have, relative to the second."""
    ours, theirs = (np.array(each[key]) for each in (run, other))
    taken = min(len(ours), len(theirs))
    results: np.ndarray = np.abs(ours[:taken] / theirs[:taken] - 1)
    return results


def cells(runs: dict[str, Any], step: int) -> list[str]:
    """Returns a step of one framework: the loss on one rank, over ranks, and with the planted fault."""
    row = [f"{runs[ONE]['losses'][step]:.6f}"]
    for name in (RANKS, FAULT):
        there = step < len(runs[name]["losses"])
        row.append(f"{runs[name]['losses'][step]:.6f} {apart(runs[name], runs[ONE])[step]:.0e}" if there else "")
    return row


def summary(runs: dict[str, Any]) -> str:
    """Returns the largest differences from one rank, with the strategy and backends of attention."""
    losses, gradients = (apart(runs[RANKS], runs[ONE], key) for key in ("losses", "moments"))
    return (
        f"first {FIRST} steps: losses {losses[:FIRST].max():.1e} apart, gradients {gradients[:FIRST].max():.1e}; all "
        f"steps: losses {losses.max():.1e}, gradients {gradients.max():.1e}; attention: "
        f"{', '.join(dict.fromkeys(runs['explained']))}"
    )


def failures(results: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    """Returns the failed checks as sentences.

    AdamW hides a factor that all gradients share, such as a mean over ranks instead of a sum. So its running mean of
    gradients is compared, too.
    """
    failed, close, nearby = [], CLOSE[dtype], GRADIENTS_CLOSE[dtype]
    for framework, runs in results.items():
        largest = apart(runs[RANKS], runs[ONE])[:FIRST].max()
        if not largest <= close:
            failed.append(f"{framework}: the first losses differ by {largest:.1e} from one rank's; expected {close:g}")
        largest = apart(runs[RANKS], runs[ONE]).max()
        if not largest <= LATER[dtype]:
            failed.append(f"{framework}: losses differ by {largest:.1e} from one rank's; expected {LATER[dtype]:g}")
        largest = apart(runs[RANKS], runs[ONE], "moments")[:FIRST].max()
        if not largest <= nearby:
            failed.append(f"{framework}: gradients differ by {largest:.1e} from one rank's; expected {nearby:g}")
        largest = apart(runs[FAULT], runs[ONE]).max()
        if not largest > close:
            failed.append(f"{framework}: the planted fault changes losses by {largest:.1e}; expected over {close:g}")
    largest = apart(results[JAX][RANKS], results[TORCH][RANKS])[:FIRST].max()
    if not largest <= close:
        failed.append(f"over ranks, JAX's first losses differ by {largest:.1e} from torch's; expected {close:g}")
    return failed
