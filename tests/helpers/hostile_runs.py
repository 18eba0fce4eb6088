"""Calls public functions with bad values in other processes, so that one that dies or never returns is a fault, too."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xla_compiler

ROOT = Path(__file__).parents[2]
JUDGE = ROOT / "tests/helpers/hostile_judge.py"
PATIENCE = 120.0
"""Seconds after which a call hangs."""
NO_FAULT = ("right", "accepted", "refused", "host's error", "no backend", "no memory")


def judged(framework: str, seed: int, first: int, count: int, judge: Path = JUDGE) -> Iterator[dict[str, Any]]:
    """Yields a line for every call: number, function, case, outcome, text. Starts another process if one ends early."""
    end = first + count
    while first < end:
        begun = None
        for line in _lines(framework, seed, first, end - first, judge):
            if line["outcome"]:
                first = line["number"] + 1
                begun = None
                yield line
            else:
                begun = line
        if begun is None:
            if first < end:
                raise RuntimeError(f"the process of {framework} ended between two calls, before call {first}")
            return
        yield begun | {"outcome": begun.get("ended", "crash"), "text": begun.get("log", "")}
        first = begun["number"] + 1


def _lines(framework: str, seed: int, first: int, count: int, judge: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of one process. The last one says how the process ended if it ended within a call."""
    command = [sys.executable, "-P", str(judge), framework, *map(str, (seed, first, count))]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment(), cwd=ROOT)
        assert process.stdout is not None
        last: dict[str, Any] = {}
        with process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                ready = selector.select(PATIENCE)
                if not ready:
                    process.kill()
                chunk = os.read(process.stdout.fileno(), 2**16) if ready else b""
                if not chunk:
                    break
                *whole, rest = (rest + chunk).split(b"\n")
                for line in map(json.loads, whole):
                    last = line
                    yield line
        if not last:
            log.seek(0)
            raise RuntimeError(f"the process of {framework} ran no call:\n{log.read()[-3000:]}")
        if not last["outcome"]:
            log.seek(0)
            yield last | {"ended": "crash" if ready else "hang", "log": log.read()[-600:]}


def _environment() -> dict[str, str]:
    """The environment of a process: one thread, a CPU, and XLA's quick compiler."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_compiler.flags()}
