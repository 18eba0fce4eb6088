"""Raises KeyboardInterrupt at a chosen line of the project's code, as Ctrl-C would; and scenes with a real SIGINT."""

from __future__ import annotations

import ast
import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parents[2])
PACKAGES = tuple(f"{ROOT}/{name}/" for name in ("attn_core", "torch_frontend", "jax_frontend"))
FOREVER = 10**9


@cache
def _untouched(file: str) -> frozenset[int]:
    """Returns the lines of a file at which Python itself never raises KeyboardInterrupt, although a line begins there:
    the end of a ``with`` block, before its context is left, and the way from a ``try`` to its ``finally``."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.With):
            lines.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Try) and node.finalbody:
            lines.add(node.finalbody[0].lineno)
    return frozenset(lines)


class _Lines:
    """Counts the lines that run, and interrupts at one of them, once."""

    def __init__(self, at: int, parts: tuple[str, ...]) -> None:
        self.at, self.parts, self.seen = at, parts, 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.parts):
            return None
        if event == "line" and frame.f_lineno not in _untouched(file):
            self.seen += 1
            if self.seen == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.trace


@contextmanager
def interrupted_at(line: int, parts: tuple[str, ...] = PACKAGES) -> Iterator[_Lines]:
    """Interrupts the block at its ``line``-th line (from 1) in files below ``parts``; swallows the interruption."""
    lines, before = _Lines(line, parts), sys.gettrace()
    enabled = gc.isenabled()
    gc.disable()  # a destructor would swallow the interruption
    with _swallowed() as swallowed:
        sys.settrace(lines.trace)
        try:
            yield lines
            _settle()
        except KeyboardInterrupt:
            if lines.seen < lines.at:
                raise
        except Exception:  # XLA's, if the line was inside a callback of JAX: KeyboardInterrupt follows
            with suppress(KeyboardInterrupt):
                _settle(0.0 if swallowed else 5.0)  # it follows late on a busy machine
                if not swallowed:
                    raise
        finally:
            sys.settrace(before)
            if enabled:
                gc.enable()


@contextmanager
def _swallowed() -> Iterator[list[Any]]:
    """Collects the interruptions that Python drops because they came in a destructor or a weak reference's callback.

    References that end on the way of XLA's error to the caller run such callbacks of Python's own ``weakref``.
    """
    swallowed: list[Any] = []
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            swallowed.append(unraisable.exc_type)
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield swallowed
    finally:
        sys.unraisablehook = before


def _settle(seconds: float = 0.0) -> None:
    """Waits for an interruption that a callback of JAX carries to the main thread."""
    sys.settrace(None)
    until = time.monotonic() + seconds
    for _ in range(100):
        time.sleep(0)
    while time.monotonic() < until:
        time.sleep(0.001)


def count_lines(call: Callable[[], Any], parts: tuple[str, ...] = PACKAGES) -> int:
    """Returns how many lines of these files a call runs in this thread."""
    with interrupted_at(FOREVER, parts) as lines:
        call()
    return lines.seen


def interrupt_at_moment(at: int, call: Callable[[], Any]) -> int:
    """Interrupts a call at its ``at``-th moment (from 1) at which Ctrl-C may arrive; returns the moments so far.

    Python handles signals as a function written in Python begins and after a function written in C has returned: in
    anybody's code, torch's, too. (It also does at the end of a loop's body.)
    """
    seen, enabled = 0, gc.isenabled()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return"):
            seen += 1
            if seen == at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    gc.disable()  # a destructor would swallow the interruption
    try:
        sys.setprofile(profile)
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        if enabled:
            gc.enable()
    return seen


def held_locks() -> list[str]:
    """Returns the names of the locks of our modules that are held now."""
    held = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("attn_core", "torch_frontend", "jax_frontend"):
            for variable, value in vars(module).items():
                for lock in (value, getattr(value, "_lock", None), getattr(value, "lock", None)):
                    if isinstance(lock, type(threading.Lock())) and lock.locked():
                        held.append(f"{name}.{variable}")
    return held


# Scenes with a real SIGINT, each in a process of its own that prints one JSON object

INTERRUPTS = 24


def scene(*arguments: str) -> dict[str, Any]:
    """Runs a scene, the first argument, in a process of its own, and returns what it says."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "interruptions", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def scene_random() -> dict[str, Any]:
    """Calls of both frontends, interrupted at random moments; the calls in between must be right."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

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
