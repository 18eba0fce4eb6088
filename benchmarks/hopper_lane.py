"""Measures JAX's lanes on a GPU: the overhead of callbacks, and flash4 launched by XLA next to other libraries."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import torch

import jax_frontend
import torch_frontend
from attn_core import backends
from attn_core.call.tensors import Inputs
from benchmarks import hopper_jax, hopper_torch
from benchmarks.hopper_group import LARGE, TINY, Group, Turn, host_turn
from benchmarks.hopper_torch import FORWARD, TRAINING
from benchmarks.measure import median_ratio
from jax_frontend.bridge import compiled_lane

CHAIN_GOAL, SITE_GOAL = 6.5, 50.0
"""Goals: microseconds of a call in a chain, and milliseconds of tracing and lowering a call site."""
JAX_NN_GOALS = {FORWARD: 1.10, TRAINING: 1.12}
TOKAMAX_GOALS = {FORWARD: None, TRAINING: 1.15}
OURS = partial(jax_frontend.attention, causal=True, backend="flash4")
CALLED_BACK = ("flash2", "sdpa_flash", "flash3", "flash4")


def compiled() -> list[Group]:
    """Measures the compiled lane: the large shape, a chain of tiny calls, and the time to trace a call site."""
    return [_large(FORWARD), _large(TRAINING), _chain(), _call_site()]


@contextmanager
def by_callback() -> Iterator[None]:
    """Makes calls that are first traced in the block take the callback lane, also later, because the lane is cached."""
    reasons, compiled_lane.static_reasons = compiled_lane.static_reasons, lambda *_: ("requested",)
    try:
        yield
    finally:
        compiled_lane.static_reasons = reasons


def in_callback(backend: str) -> Callable[[], Turn]:
    """Prepares a chain of tiny calls on the callback lane, with a scale that no other call has."""

    def made() -> Turn:
        with by_callback():
            turn = hopper_jax.jax_chain(partial(jax_frontend.attention, causal=True, backend=backend, scale=0.126))
            turn(1)
        return turn

    return made


def _large(what: str) -> Group:
    note = f"{LARGE}; the host's clock times a queue of 40 calls; {hopper_jax.REST} s of rest before each turn"
    group = Group(f"The compiled lane, {what}", note, LARGE.flops(what))
    call = partial(torch_frontend.attention, causal=True, backend="flash4")
    jax_nn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    makers: dict[str, Callable[[], Turn]] = {
        "attention in torch flash4": hopper_torch.turn_of(lambda: call, what, clock=host_turn),
        "attention in JAX flash4": partial(hopper_jax.jitted, OURS, what),
        "jax.nn cudnn": partial(hopper_jax.jitted, jax_nn, what),
        "tokamax mosaic": lambda: hopper_jax.jitted(hopper_jax.tokamax(), what),
        "fa4-jax": lambda: hopper_jax.jitted(_fa4_jax(), what),
    }
    group.measure(makers, calls=40, rounds=9, rest=hopper_jax.REST)
    group.speed("beside torch", "attention in JAX flash4", "attention in torch flash4", 0.98)
    group.speed("beside jax.nn", "attention in JAX flash4", "jax.nn cudnn", JAX_NN_GOALS[what])
    group.speed("beside tokamax", "attention in JAX flash4", "tokamax mosaic", TOKAMAX_GOALS[what])
    group.speed("beside fa4-jax", "attention in JAX flash4", "fa4-jax", 1.0)
    return group


def _fa4_jax() -> Callable[..., Any]:
    import fa4_jax  # type: ignore[import-not-found]

    return partial(fa4_jax.flash_attn, causal=True, backend="cute")


def _chain() -> Group:
    note = f"{TINY}; a jitted program of {hopper_jax.CHAIN} calls, each on the output of the last, by the host's clock"
    group = Group("A chain of tiny calls", note)
    jax_nn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    makers = {
        "attention in JAX flash4": partial(hopper_jax.jax_chain, OURS),
        "attention in JAX flash4, callback lane": in_callback("flash4"),
        "jax.nn cudnn": partial(hopper_jax.jax_chain, jax_nn),
    }
    group.measure(makers, calls=50, rounds=15)
    name = "attention in JAX flash4"
    if name in group.seconds:
        microseconds = sorted(group.seconds[name])[len(group.seconds[name]) // 2] * 1e6
        group.value("a call", microseconds, "µs", f"<= {CHAIN_GOAL:g}")
        for other in ("jax.nn cudnn", "attention in JAX flash4, callback lane"):
            if other in group.seconds:
                group.value(f"beside {other}", median_ratio(group.seconds, name, other), f"times the speed of {other}")
        launches = _graph_launches()
        group.value(
            f"CUDA graph launches in 10 runs of the chain ({launches[1]} kernel launches)", launches[0], "", ">= 1"
        )
    else:
        group.missing("a call", group.not_run.get(name, "not run"), f"<= {CHAIN_GOAL:g}")
    return group


def _graph_launches() -> tuple[int, int]:
    """Counts the launches of CUDA graphs and of single kernels in 10 runs of the chain, with JAX's profiler."""
    turn = hopper_jax.jax_chain(OURS)
    turn(3)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            turn(9)  # and one untimed call
        (written,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(written))
        names = [event.name for plane in data.planes for line in plane.lines for event in line.events]
    return sum("GraphLaunch" in name for name in names), sum("LaunchKernel" in name for name in names)


def _call_site() -> Group:
    """Measures the time to trace and lower one more call site of a program, if its kernel is already compiled."""
    group = Group(
        "A call site",
        f"{TINY}; trace and lower, without XLA's compilation; a program of 20 calls minus one of 1",
    )
    q, k, v, _ = hopper_jax.arrays(TINY)

    def lowered(count: int) -> float:
        def program(last: Any, k: Any, v: Any) -> Any:
            for _ in range(count):
                last = OURS(last, k, v)
            return last

        jax.clear_caches()
        began = time.perf_counter()
        jax.jit(program).lower(q, k, v)
        return time.perf_counter() - began

    for _ in range(2):
        lowered(1)
    rounds = sorted((lowered(20) - lowered(1)) / 19 for _ in range(5))
    group.value("a further call site", rounds[2] * 1e3, "ms", f"<= {SITE_GOAL:g}")
    group.value("a program with one", sorted(lowered(1) for _ in range(5))[2] * 1e3, "ms", f"<= {SITE_GOAL:g}")
    seconds = compiled_lane.compile_seconds().values()
    group.value(f"compiling {len(seconds)} kernels in this process", sum(seconds), "s")
    return group


def callback_lane() -> list[Group]:
    """Measures the overhead of the callback lane: JAX's time per call minus torch's for the backend's own forward."""
    note = (
        f"{TINY}. JAX: one jitted program of {hopper_jax.CHAIN} calls, each on the output of the last one. torch: the "
        "same chain of the backend's own forward(spec, inputs) in a Python loop. The host's clock times both until "
        "the last result is ready; the time is divided by the number of calls"
    )
    group = Group("The callback lane", note)
    makers: dict[str, Callable[[], Turn]] = {}
    for name in CALLED_BACK:
        makers[f"forward() in torch {name}"] = partial(_torch_chain, name)
        makers[f"attention in JAX {name}"] = in_callback(name)  # XLA would otherwise launch flash4 itself
    jax_nn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    makers["jax.nn cudnn"] = partial(hopper_jax.jax_chain, jax_nn)
    group.measure(makers, calls=50, rounds=15)
    for name in CALLED_BACK:
        group.extra(f"backend={name!r}", f"attention in JAX {name}", f"forward() in torch {name}", 12.0)
    return [group]


def _torch_chain(backend: str) -> Turn:
    q, k, v, _ = hopper_torch.tensors(TINY, FORWARD)
    selection = torch_frontend.explain(q, k, v, causal=True, backend=backend)
    torch_frontend.attention(
        q, k, v, causal=True, backend=backend
    )  # raises an error with every reason if the backend cannot run it
    module = backends.load(backend, "cuda")
    spec, forward = selection.spec, module.forward

    def chain() -> torch.Tensor:
        last = q
        for _ in range(hopper_jax.CHAIN):
            last, _ = forward(spec, Inputs(last, k, v))
        return last

    return host_turn(chain, hopper_jax.CHAIN)
