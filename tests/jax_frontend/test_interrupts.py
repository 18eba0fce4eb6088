"""Tests Ctrl-C while the bridge runs a kernel inside a JAX program: the user gets one KeyboardInterrupt."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, time
import jax, jax.numpy as jnp
from frameworks import replaced
from attn_core import backends
from jax_frontend import attention

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that Ctrl-C is ignored
direction, form = {direction!r}, {form!r}
math = backends.load("math", "cpu")
kernel, times = getattr(math, direction), []

def interrupted(*given):
    if pressing:
        times.append(None)
        os.kill(os.getpid(), signal.SIGINT)
    return kernel(*given)

def layers(x):
    for _ in range(3):
        x = attention(x, x, x, softcap=3.0, backend="math")
    return x.sum()

function = jax.grad(layers) if direction == "backward" else layers
function = jax.jit(function) if form == "jit" else function
x, seen = jnp.ones((1, 5, 2, 16)), []
with replaced(math, **{{direction: interrupted}}):
    for _ in range(5):
        pressing = True
        try:
            try:
                function(x).block_until_ready()
                seen.append("a result")
            except Exception as error:
                seen.append(repr(error))
        except KeyboardInterrupt:
            seen.append("KeyboardInterrupt")
        pressing = False
        for _ in range(100):  # a second one would arrive here
            time.sleep(0)
        function(x).block_until_ready()
print(seen, len(times))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["eager", "jit"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_ctrl_c_inside_a_kernel_raises_keyboard_interrupt(direction, form):
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-c", SCRIPT.format(direction=direction, form=form)]
    actual = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert (actual.stdout.strip(), actual.stderr) == (f"{['KeyboardInterrupt'] * 5} 5", "")
