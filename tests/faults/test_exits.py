"""Tests that a process with attention in flight exits within seconds, with code 0, and without a word.

Threads that run torch or JAX at exit are not daemons here: Python ends a daemon inside torch's or JAX's C++ code, which
aborts the process, also without this project.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import os, sys, threading, time
def loop(step):
    running = threading.Event()
    def work():
        step()
        running.set()
        until = time.monotonic() + 1
        while time.monotonic() < until:  # while the main thread is at its end
            step()
    threading.Thread(target=work).start()
    assert running.wait(300)
"""
TORCH = START + "import torch, torch_frontend\nx = torch.ones(1, 300, 4, 32)\n"
JAX = START + "import jax, jax.numpy as jnp, jax_frontend\nx = jnp.ones((1, 300, 4, 32))\n"
PAGED = """
cache = frontend.PagedKVCache(num_layers=1, num_pages=64, page_size=16, kv_heads=1, head_dim=8)
cache.add("a")
def step():
    if cache.allocator.length("a") > 900:
        cache.free("a")
        cache.add("a")
    tables = cache.step(["a"])
    cache.update(0, token, token, tables)
    cache.attend(0, token, tables)
loop(step)
"""
BRIDGED = """
f = jax.jit(lambda x: jax_frontend.attention(x, x, x, backend="math"))
f(x).block_until_ready()
"""
SCENES = {
    "torch: threads in a forward, in a backward, and in an engine on pages": TORCH
    + """
loop(lambda: torch_frontend.attention(x, x, x, backend="math"))
y = x.clone().requires_grad_()
loop(lambda: torch.autograd.grad(torch_frontend.attention(y, y, y, softcap=9.0).sum(), y))
frontend, token = torch_frontend, torch.ones(1, 1, 8)
"""
    + PAGED,
    "jax: threads in a callback, and in an engine on pages": JAX
    + BRIDGED
    + "loop(lambda: f(x).block_until_ready())\nfrontend, token = jax_frontend, jnp.ones((1, 1, 8))"
    + PAGED,
    "jax: results that nobody awaits, also of a daemon that rests": JAX
    + BRIDGED
    + """
asked = threading.Event()
def work():
    kept = [f(x) for _ in range(20)]
    asked.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
asked.wait()
for _ in range(20):
    f(x)
""",
}


@pytest.mark.sampled
@pytest.mark.parametrize("scene", SCENES)
def test_a_process_with_work_in_flight_exits(scene: str) -> None:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SCENES[scene]]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
