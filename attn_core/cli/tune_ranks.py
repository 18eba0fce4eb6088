"""``attn tune --ranks N``: measures links between ranks and attention on one of them, for context parallelism's choice.

The command starts the ranks with torch's launcher, one process each, and rank 0 writes the figures.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from attn_core.context_parallel.cost.machine import Constants
from attn_core.context_parallel.cost.tuned import FORMAT, tuned_constants, tuned_path
from attn_core.errors import SpecError
from attn_core.selection.tables import device_name, versions
from attn_core.selection.whole_file import check_place, names_file, write_whole

SECONDS = 300.0
"""How long the ranks may take, also to compile kernels."""
LAUNCHER = ("-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class RanksError(RuntimeError):
    """The ranks failed; the message is the end of their output."""


def tune_ranks(ranks: int, device: str) -> str:
    """Measures over ``ranks`` processes of this host, and writes the figures; returns what to print.

    Raises:
        SpecError: if the file cannot be written, or this machine has fewer GPUs than ranks.
        RanksError: if a process failed.
    """
    if device != "cpu" and (count := _gpus()) < ranks:
        raise SpecError(f"--ranks={ranks}: expected at most the {count} GPUs of this machine")
    path = tuned_path(device)
    check_place(next(folder for folder in path.parents if folder.exists()) / path.name)
    measured = _run_ranks(ranks, device)
    table = _table(measured, ranks, device)
    kept = table["sources"]["not measured, as in the package"]
    constants = tuned_constants(table)  # raises here instead of in every later process
    with names_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(json.dumps(table, indent=1) + "\n", path)
    return (
        f"{_report(constants)}\n  not measured, so as for {Constants.of(device).device_name}: {kept}\n"
        f"wrote {path}; context parallelism follows it in new processes"
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _run_ranks(ranks: int, device: str) -> dict[str, Any]:
    with TemporaryDirectory() as name:
        out, log = Path(name) / "figures.json", Path(name) / "log"
        kind = "cpu" if device == "cpu" else "cuda"
        command = [sys.executable, *LAUNCHER, str(ranks), "-m", "attn_core.cli.measure_ranks", kind, str(out)]
        # Ranks must not import from the working folder either.
        environ = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONSAFEPATH": "1"}
        with log.open("w") as file:
            running = subprocess.Popen(
                command, env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = running.wait(SECONDS)
            except subprocess.TimeoutExpired as error:
                raise RanksError(f"the ranks did not end within {SECONDS:g} s") from error
            finally:
                if running.poll() is None:  # also after Ctrl-C
                    os.killpg(running.pid, signal.SIGKILL)  # and its ranks
                    running.wait()
        if code or not out.exists():
            raise RanksError(f"a rank ended with {code}:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")
        return dict(json.loads(out.read_text(encoding="utf-8")))


def _table(measured: dict[str, Any], ranks: int, device: str) -> dict[str, Any]:
    """Returns the content of the file: what was measured, and the package's figures for the rest."""
    base = asdict(Constants.of(device))
    kept = sorted(set(base) - set(measured) - {"device", "device_name"})
    return {
        **base,
        **measured,
        **{"device": device, "device_name": device_name(device) or measured["device_name"]},
        **{"format": FORMAT, "ranks": ranks, "date": datetime.now(UTC).strftime("%Y-%m-%d"), "versions": versions()},
        "sources": {
            "measured": f"attn tune --ranks {ranks}: {', '.join(sorted(set(measured) - {'device_name'}))}",
            "host_us": "the package's figures times one factor, the median over calls of a few tokens",
            "not measured, as in the package": ", ".join(kept),
        },
    }


def _report(constants: Constants) -> str:
    call, tile, exchange = constants.host_us
    lines = [
        f"{constants.device_name}:",
        f"  attention {constants.forward_tflops:.3g} TFLOP/s forward, {constants.backward_tflops:.3g} backward; "
        f"{constants.call_us:.3g} us a call; memory {constants.memory_gib_s:.3g} GiB/s, overlap "
        f"{constants.overlap:.2f}",
        f"  host {call:.3g} us a call over ranks, {tile:.3g} us more a tile, {exchange:.3g} us more an exchange; a "
        f"backward {constants.host_backward:.3g} times as long",
    ]
    for kind, rows in constants.links:
        latency = rows[0][0] / 1024 / rows[0][1]
        rates = ", ".join(f"{rate:.3g} GiB/s at {size:g} MiB" for size, rate in rows[1:])
        lines.append(f"  {kind}: {latency * 1e6:.3g} us, {rates}")
    return "\n".join(lines)
