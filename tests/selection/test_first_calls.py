"""Tests the first calls of a process from several threads at once: initialisation runs once."""

import threading
import time

import pytest
from own_process import in_its_own_process

from attn_core.backends.shared.caches import cached_once

THREADS = 8
TOGETHER = """
import sys, threading, traceback
sys.setswitchinterval(1e-5)
barrier, failures = threading.Barrier(8), []

def work(number):
    barrier.wait()
    try:
        call(number)
    except BaseException:
        failures.append(traceback.format_exc())

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*failures, sep="\\n")
"""
CALLS = {
    "jax": """
import jax, jax.numpy as jnp
from jax_frontend import attention
x = jnp.ones((1, 5, 2, 16))

def call(number):
    backend = (None, "math", "sdpa_flash", "jax_xla")[number % 4]
    jax.jit(jax.grad(lambda x: attention(x, x, x, causal=True, backend=backend).sum()))(x).block_until_ready()
""",
    "torch": """
import torch
from torch_frontend import attention

def call(number):
    x = torch.ones(1, 5, 2, 16, requires_grad=number % 4 != 3)
    found = attention(x, x, x, causal=True, backend=(None, "math", "sdpa_flash", "flex")[number % 4])
    if x.requires_grad:
        found.sum().backward()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", CALLS)
def test_threads_can_make_the_first_calls_of_a_process_together(framework):
    actual = in_its_own_process(CALLS[framework] + TOGETHER)
    assert (actual.returncode, actual.stdout.strip()) == (0, ""), actual.stdout + actual.stderr


def together(call):
    """The results of ``call(number)`` in THREADS threads that start at one moment; the type of an error in place of
    a result."""
    barrier, results = threading.Barrier(THREADS), [None] * THREADS

    def work(number):
        barrier.wait()
        try:
            results[number] = call(number)
        except ValueError as error:
            results[number] = type(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_threads_with_one_key_share_one_run():
    runs = []

    @cached_once
    def made(key):
        runs.append(key)
        time.sleep(0.05)
        return object()

    actual = together(lambda number: made(number % 2))
    assert sorted(runs) == [0, 1]
    assert all(actual[number] is actual[number % 2] for number in range(THREADS)) and actual[0] is not actual[1]
    made.cache_clear()
    assert made(0) is not actual[0] and runs.count(0) == 2


def test_one_key_does_not_wait_for_another():
    started = threading.Event()

    @cached_once
    def made(key):
        if key == "fast":
            started.set()
            return True
        return started.wait(300)

    slow = threading.Thread(target=made, args=("slow",))
    slow.start()
    assert made("fast")
    slow.join()
    assert made("slow")


def test_an_error_is_raised_and_not_cached():
    runs = []

    @cached_once
    def made():
        runs.append(None)
        time.sleep(0.01)
        if len(runs) < 3:
            raise ValueError
        return len(runs)

    assert sorted(map(str, together(lambda _: made()))) == sorted(map(str, [ValueError] * 2 + [3] * (THREADS - 2)))
    assert len(runs) == 3


def test_a_cached_function_may_call_itself():
    @cached_once
    def factorial(number):
        return number * factorial(number - 1) if number else 1

    assert factorial(5) == 120
