"""The same model over several ranks in both frameworks, each beside itself on one: ``--ranks``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from examples.smollm2.stages import Stages
from examples.training.spread import FAULT, FIRST, ONE, RANKS, Asked

ROOT = Path(__file__).resolve().parents[2]
TORCH, JAX = "torch", "JAX"
CLOSE = {"float32": 1e-5, "bfloat16": 2e-4}
"""How closely the first losses agree, relative to the loss."""
LATER = {"float32": 1e-4, "bfloat16": 3e-2}
"""How closely all losses do: by then rounding has been fed back by every step."""
GRADIENTS_CLOSE = {"float32": 1e-4, "bfloat16": 1e-2}
"""How closely AdamW's running means of gradients do over the first steps."""


class RankError(RuntimeError):
    """The processes of a framework did not come to an end; the message is the last that they wrote."""


def compare(asked: Asked, stages: Stages) -> dict[str, dict[str, Any]]:
    """Trains in torch and in JAX, on one rank and over all: plain data, by framework.

    Raises:
        RankError: when a process failed.
    """
    launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(asked.spread.ranks), "-m"]
    commands = {TORCH: [*launched, "examples.training.torch_ranks"], JAX: ["examples.training.jax_ranks"]}
    with TemporaryDirectory() as name:
        folder = Path(name)
        asked.write(folder)
        found = {}
        for framework, command in commands.items():
            with stages.stage(f"training in {framework}: one rank, then {asked.spread.ranks}"):
                run(framework, [*command, name])
            path = folder / f"{framework.lower()}.json"
            found[framework] = json.loads(path.read_text(encoding="utf-8"))
    return found


def run(framework: str, command: list[str]) -> None:
    """Runs a module with its arguments until it ends.

    Raises:
        RankError: when it ends with an error.
    """
    alone = {"OMP_NUM_THREADS": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    ended = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env={**alone, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RankError(f"{framework} ended with {ended.returncode}:\n{ended.stdout[-4000:]}")


def apart(run: dict[str, Any], other: dict[str, Any], key: str = "losses") -> np.ndarray:
    """By how much two runs differ at every step that both took, relative to the second."""
    ours, theirs = (np.array(each[key]) for each in (run, other))
    taken = min(len(ours), len(theirs))
    found: np.ndarray = np.abs(ours[:taken] / theirs[:taken] - 1)
    return found


def cells(runs: dict[str, Any], step: int) -> list[str]:
    """A step of one framework: the loss on one rank, over ranks, and with the planted fault."""
    told = [f"{runs[ONE]['losses'][step]:.6f}"]
    for name in (RANKS, FAULT):
        there = step < len(runs[name]["losses"])
        told.append(f"{runs[name]['losses'][step]:.6f} {apart(runs[name], runs[ONE])[step]:.0e}" if there else "")
    return told


def summary(runs: dict[str, Any]) -> str:
    """What is the largest difference from one rank's, and how attention ran."""
    losses, gradients = (apart(runs[RANKS], runs[ONE], key) for key in ("losses", "moments"))
    return (
        f"first {FIRST} steps: losses {losses[:FIRST].max():.1e} apart, gradients {gradients[:FIRST].max():.1e}; all "
        f"steps: losses {losses.max():.1e}, gradients {gradients.max():.1e}; attention: "
        f"{', '.join(dict.fromkeys(runs['explained']))}"
    )


def failures(found: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    """What is not as it must be, as sentences; empty when all is well.

    AdamW hides a factor that all gradients share, such as a mean over ranks for a sum: so its running mean of gradients
    is compared, too.
    """
    told, close, gradients_close = [], CLOSE[dtype], GRADIENTS_CLOSE[dtype]
    for framework, runs in found.items():
        largest = apart(runs[RANKS], runs[ONE])[:FIRST].max()
        if not largest <= close:
            told.append(f"{framework}: the first losses differ by {largest:.1e} from one rank's; expected {close:g}")
        largest = apart(runs[RANKS], runs[ONE]).max()
        if not largest <= LATER[dtype]:
            told.append(f"{framework}: losses differ by {largest:.1e} from one rank's; expected {LATER[dtype]:g}")
        largest = apart(runs[RANKS], runs[ONE], "moments")[:FIRST].max()
        if not largest <= gradients_close:
            told.append(f"{framework}: gradients differ by {largest:.1e} from one rank's; expected {gradients_close:g}")
        largest = apart(runs[FAULT], runs[ONE]).max()
        if not largest > close:
            told.append(f"{framework}: the planted fault shows by {largest:.1e} only, no more than {close:g}")
    largest = apart(found[JAX][RANKS], found[TORCH][RANKS])[:FIRST].max()
    if not largest <= close:
        told.append(f"over ranks JAX's first losses differ by {largest:.1e} from torch's; expected {close:g}")
    return told
