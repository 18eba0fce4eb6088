"""Scenes with a real SIGINT, each in a process of its own that prints one JSON object."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

INTERRUPTS = 24


def scene(*arguments: str) -> dict[str, Any]:
    """Runs a scene, the first argument, in a process of its own, and returns what it says."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "interrupt_scenes", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def scene_random() -> dict[str, Any]:
    """Calls of both frontends, interrupted at random moments; the calls in between must be right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from interrupted_lines import held_locks

    import jax_frontend
    import torch_frontend
    from attn_core.cli import insistent_ctrl_c
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
                with insistent_ctrl_c():  # JAX's callback of the garbage collector may drop it
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


def scene_slow() -> dict[str, Any]:
    """By way and direction of a call: what the caller sees if Ctrl-C comes while a kernel runs, from elsewhere; and
    what is wrong afterwards."""
    import numpy as np
    from faulty_kernels import WAYS, faulty
    from interrupted_lines import held_locks

    from attn_core.selection.override import requested

    signal.signal(signal.SIGINT, signal.default_int_handler)
    started, result = threading.Event(), {}

    def slow(results: Any) -> Any:
        started.set()
        time.sleep(1.0)
        return results

    def press() -> None:
        started.wait()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    for name, way in WAYS.items():
        for direction in ("forward", "backward"):
            expected, wrong = way.run(direction, "math"), []
            started.clear()
            with faulty("math", direction, slow, runs=(1,)):
                presses = threading.Thread(target=press)
                presses.start()
                try:
                    try:
                        way.run(direction, "math")
                        seen = "a result"
                    except Exception as error:  # XLA's, from inside a callback; KeyboardInterrupt follows
                        seen = repr(error)
                    time.sleep(5.0)
                except KeyboardInterrupt:
                    seen = "KeyboardInterrupt"
                presses.join()
                time.sleep(0.05)  # a second one would come here
                if not np.array_equal(way.run(direction, "math"), expected):
                    wrong.append("another result")
            wrong += [*held_locks(), *([] if requested() is None else ["an override"])]
            result[f"{name}, {direction}"] = [seen, *wrong]
    return result


if __name__ == "__main__":
    print(json.dumps(globals()[f"scene_{sys.argv[1]}"](*sys.argv[2:])))
