"""Compilation at the first call of its kind: one at a time, never while a CUDA graph is captured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from attn_core.backends.shared.cached_once import cached_once

MOST_KEYS = 2**15
"""How many keys are remembered. Forgetting one compiles nothing again: it only asks for warm_up before a capture."""


@cached_once
def _compiled() -> set[Hashable]:
    return set()


@cached_once
def _compiling() -> threading.Lock:
    return threading.Lock()


def run(key: Hashable, call: Callable[[], Any], what: Callable[[], str], remedy: str = "call warm_up first") -> Any:
    """The call's result. The first call of a key compiles: alone in this process, and not while a graph is captured.

    Args:
        key: everything that the compiled code depends on, the device among it.
        call: must not come back here.
        what: names the call for the error; remedy: what the error asks for.

    Raises:
        RuntimeError: where torch is capturing a CUDA graph and nothing has run with this key.
    """
    if key in _compiled():
        return call()
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{what()} is not compiled yet, and a CUDA graph cannot capture the compilation; {remedy}")
    with _compiling():
        found = call()
        if len(_compiled()) >= MOST_KEYS:  # decoding has a new length at every step
            _compiled().clear()
        _compiled().add(key)
    return found
