"""Tests kernels that take long: other threads proceed, Ctrl-C works, the result is right, and nothing is kept.

A slow kernel here waits for what other threads do, so no test measures a time: a call that held the others up would end
in an error after minutes. ``tests/faults/test_ranks.py`` has a rank that is late.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest
from faulty_kernels import WAYS, faulty
from interruptions import held_locks, scene

pytestmark = pytest.mark.sampled

DIRECTIONS = ("forward", "backward")
LONG = 200.0
"""Seconds after which a thread that waits counts as stuck."""
THREADS = 6


class Slow:
    """The fault of a kernel that waits, given what it waits for.

    Attributes:
        started: set when the kernel has begun to wait.
        locks: our locks that were held meanwhile.
        results: weak references to what the kernel computed.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.started, self.locks, self.results, self._wait = threading.Event(), [], [], wait

    def __call__(self, results: Any) -> Any:
        self.results += [weakref.ref(each) for each in results if each is not None]
        self.locks += held_locks()
        self.started.set()
        assert self._wait()
        return results

    def assert_nothing_is_kept(self) -> None:
        gc.collect()
        assert self.results and [each for each in self.results if each() is not None] == []
        assert self.locks == held_locks() == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_threads_proceed_while_a_kernel_is_slow(way: str, direction: str) -> None:
    """Calls of both frontends, eager and compiled, on the same backend and on another, while the kernel waits."""
    calls = [(other, backend) for other in WAYS for backend in ("math", "sdpa_flash")]
    expected = {call: WAYS[call[0]].run(direction, call[1]) for call in calls}
    gc.collect()
    arrays, free = len(jax.live_arrays()), threading.Event()
    slow = Slow(lambda: free.wait(LONG))
    with faulty("math", direction, slow, runs=(1,)) as kernel, ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(WAYS[way].run, direction, "math")
        try:
            assert slow.started.wait(LONG)
            for other, backend in calls:
                actual = pool.submit(WAYS[other].run, direction, backend).result(LONG)
                np.testing.assert_array_equal(actual, expected[other, backend])
            assert kernel.count == 1 + len(WAYS) and not waiting.done()
        finally:
            free.set()
        np.testing.assert_array_equal(waiting.result(LONG), expected[way, "math"])
        del waiting, actual
        np.testing.assert_array_equal(WAYS[way].run(direction, "math"), expected[way, "math"])
    slow.assert_nothing_is_kept()
    assert len(jax.live_arrays()) == arrays


@pytest.mark.parametrize("way", ["torch eager", "jax eager", "jax jit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_slow_kernels_of_many_threads_run_at_once(way: str, direction: str) -> None:
    """Each kernel waits until all threads are inside one, so a call that waits for another's end would never end."""
    expected = WAYS[way].run(direction, "math")
    inside = threading.Barrier(THREADS)
    slow = Slow(lambda: inside.wait(LONG) >= 0)
    with faulty("math", direction, slow) as kernel, ThreadPoolExecutor(THREADS) as pool:
        for _ in range(2):
            for future in [pool.submit(WAYS[way].run, direction, "math") for _ in range(THREADS)]:
                np.testing.assert_array_equal(future.result(2 * LONG), expected)
                del future
        assert kernel.count == 2 * THREADS
    slow.assert_nothing_is_kept()


@pytest.mark.slow
def test_ctrl_c_while_a_kernel_is_slow() -> None:
    """In a process of its own, from another thread than the caller's. The next call is right, without another one."""
    said = scene("slow")
    assert said == {f"{way}, {direction}": ["KeyboardInterrupt"] for way in WAYS for direction in DIRECTIONS}
