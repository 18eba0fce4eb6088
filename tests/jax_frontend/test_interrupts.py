"""Tests Ctrl-C while the bridge runs a kernel inside a JAX program: the user gets one KeyboardInterrupt."""

import pytest
from own_process import in_its_own_process

SCRIPT = """
import os, signal, time
import jax, jax.numpy as jnp
from frameworks import replaced
from attn_core import backends
from jax_frontend import attention

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that Ctrl-C is ignored
math, x = backends.load("math", "cpu"), jnp.ones((1, 5, 2, 16))

def layers(x):
    for _ in range(3):
        x = attention(x, x, x, softcap=3.0, backend="math")
    return x.sum()

def interrupt(direction, form):
    kernel, seen, times = getattr(math, direction), [], []

    def interrupted(*given):
        if pressing:
            times.append(None)
            os.kill(os.getpid(), signal.SIGINT)
        return kernel(*given)

    function = jax.grad(layers) if direction == "backward" else layers
    function = jax.jit(function) if form == "jit" else function
    with replaced(math, **{direction: interrupted}):
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
    print(direction, form, seen, len(times))

for direction in ("forward", "backward"):
    for form in ("eager", "jit"):
        interrupt(direction, form)
"""


@pytest.mark.slow
def test_ctrl_c_inside_a_kernel_raises_keyboard_interrupt():
    done = in_its_own_process(SCRIPT)
    expected = f"{['KeyboardInterrupt'] * 5} 5"
    ways = [f"{direction} {form}" for direction in ("forward", "backward") for form in ("eager", "jit")]
    assert (done.stdout.splitlines(), done.stderr) == ([f"{way} {expected}" for way in ways], "")
