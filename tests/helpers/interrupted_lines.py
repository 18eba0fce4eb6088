"""Raises KeyboardInterrupt at a chosen line of the project's code, as Ctrl-C would at a chosen moment."""

from __future__ import annotations

import ast
import gc
import sys
import threading
import time
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
    sys.settrace(lines.trace)
    try:
        yield lines
        _settle()
    except KeyboardInterrupt:
        if lines.seen < lines.at:
            raise
    except Exception:  # XLA's, if the line was inside a callback of JAX: KeyboardInterrupt follows
        with suppress(KeyboardInterrupt):
            _settle(5.0)  # it follows late on a busy machine
            raise
    finally:
        sys.settrace(before)
        if enabled:
            gc.enable()


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
