"""Scenes with a real SIGINT for ``tests/faults/test_interruptions.py``; each prints one JSON object."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

INTERRUPTS = 24


def scene_random() -> dict[str, Any]:
    """Calls of both frontends, interrupted at random moments; the calls in between must be right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from interrupted_lines import held_locks

    import jax_frontend
    import torch_frontend
    from attn_core.selection.override import requested

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = jax.jit(lambda x: jax_frontend.attention(x, x, x, softcap=4.0, backend="math"))

    def calls(length: int) -> list[Any]:
        x = np.ones((1, length, 2, 8), np.float32)
        leaf, here = torch.from_numpy(x).requires_grad_(), jnp.asarray(x)
        with torch_frontend.use_backend("math"):
            out = torch_frontend.attention(leaf, leaf, leaf, causal=True)
            out.sum().backward()
        return [out.detach(), np.asarray(program(here)), np.asarray(jax_frontend.attention(here, here, here))]

    calls(5)
    draw, interrupted, wrong = random.Random(7), 0, []
    for number in range(INTERRUPTS):
        timer = threading.Timer(draw.uniform(0.0, 0.03), os.kill, (os.getpid(), signal.SIGINT))
        try:
            try:
                timer.start()
                while True:
                    calls(6 + number % 4)
            except Exception as error:
                # XLA's, from inside a callback; KeyboardInterrupt follows. It does not if Ctrl-C came while the
                # callback was being entered: then the error is all that the caller sees.
                time.sleep(0.2)
                interrupted += 1
                if "INTERNAL" not in str(error):
                    wrong.append(traceback.format_exc())
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        right = all(np.allclose(each, 1.0) for each in calls(6 + number % 4))
        if not right or requested() is not None or held_locks():
            wrong.append([number, right, requested(), held_locks()])
    return {"interrupted": interrupted, "wrong": wrong}


def scene_commands(folder: str) -> dict[str, Any]:
    """By command: (its exit code after SIGINT, what its file says). Forked, so that the imports happen once."""
    import torch

    from attn_core.cli import main
    from attn_core.cli.app import app  # noqa: F401 (imported before the fork)

    torch.set_num_threads(1)
    result = {}
    for name, options in {
        "campaign": ["--minutes", "5", "--only", "torch attention"],
        "bench": ["--device", "cpu", "--calls", "300", "--rounds", "1"],
    }.items():
        file = Path(folder) / f"{name}.json"
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            sys.argv = ["attn", name, *options, "--json", str(file)]
            try:
                main()
            except SystemExit as leaving:
                os._exit(leaving.code if isinstance(leaving.code, int) else 99)
            except BaseException:
                os._exit(98)
            os._exit(0)
        until = time.monotonic() + 40
        marker = file.with_name(file.name + ".running") if name == "campaign" else None
        while marker is not None and not marker.exists() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(2.5)
        os.kill(child, signal.SIGINT)
        _, status = os.waitpid(child, 0)
        content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        left = sorted(each.name for each in Path(folder).iterdir() if each.name.startswith(name))
        counted = None if content is None else content.get("calls", len(content.get("cases", ())))
        result[name] = [os.waitstatus_to_exitcode(status), left, counted]
    return result


if __name__ == "__main__":
    print(json.dumps(globals()[f"scene_{sys.argv[1]}"](*sys.argv[2:])))
