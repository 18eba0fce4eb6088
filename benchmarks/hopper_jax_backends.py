"""Finds the fastest backend in JAX by the size of a call, because the overhead of a lane adds to the kernel's time.

The order of preference comes from a sweep in torch. In JAX, a kernel that XLA launches itself has less overhead than a
kernel that is called through Python. The difference matters for short kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax_frontend
from benchmarks import hopper_jax
from benchmarks.hopper_group import Group, Shape, Turn
from benchmarks.hopper_torch import FORWARD, TRAINING
from benchmarks.measure import median_ratio, medians

CHAIN = 8
NAMES = ("flash4", "flash3", "flash2", "sdpa_flash", "sdpa_cudnn", "jax_cudnn")
SHAPES = (
    Shape(1, 64, 4, 4, 64),
    Shape(2, 512, 4, 2, 32),
    Shape(1, 128, 32, 8, 128),
    Shape(1, 512, 32, 8, 128),
    Shape(1, 1024, 32, 8, 128),
    Shape(2, 2048, 32, 8, 128),
)


def by_size() -> list[Group]:
    """Measures every shape, forward and forward + backward."""
    return [_group(shape, what) for what in (FORWARD, TRAINING) for shape in SHAPES]


def _group(shape: Shape, what: str) -> Group:
    note = f"One jitted program of {CHAIN} calls, each on the output of the last; seconds per call by the host's clock"
    group = Group(f"{shape}, {what}", note, shape.flops(what))
    call = partial(jax_frontend.attention, causal=True)
    names = [name for name in NAMES if what == FORWARD or name != "flash3"]
    makers: dict[str, Callable[[], Turn]] = {
        f"attention in JAX {name}": partial(
            hopper_jax.jitted, hopper_jax.chained(partial(call, backend=name), CHAIN), what, shape, CHAIN
        )
        for name in names
    }
    group.measure(makers, calls=10, rounds=7)
    chosen = hopper_jax.choice(shape, what)
    best = min(medians(group.seconds).items(), key=lambda item: item[1])[0].rpartition(" ")[2] if group.seconds else ""
    label = f"automatic choice ({chosen}) beside the fastest ({best})"
    if f"attention in JAX {chosen}" in group.seconds:
        times = median_ratio(group.seconds, f"attention in JAX {best}", f"attention in JAX {chosen}")
        group.value(label, times, "times its time", "<= 1.25")
    else:
        group.missing(label, f"not run: {chosen} is not among the candidates", "<= 1.25")
    return group
