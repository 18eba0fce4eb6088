"""JAX's lanes on a GPU: what callbacks add; flash4 launched by XLA itself, beside torch, jax.nn and tokamax."""

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
"""Microseconds a call in a chain, milliseconds of tracing and lowering a call site."""
JAX_NN_GOALS = {FORWARD: 1.10, TRAINING: 1.12}
TOKAMAX_GOALS = {FORWARD: None, TRAINING: 1.15}
OURS = partial(jax_frontend.attention, causal=True, backend="flash4")
CALLED_BACK = ("flash2", "sdpa_flash", "flash3", "flash4")


def compiled() -> list[Group]:
    """The compiled lane: the large shape, a chain of tiny calls, and what a call site costs to trace."""
    return [_large(FORWARD), _large(TRAINING), _chain(), _call_site()]


@contextmanager
def by_callback() -> Iterator[None]:
    """A call that is first traced in here takes the callback lane, then and later: its lane is kept with it."""
    reasons, compiled_lane.static_reasons = compiled_lane.static_reasons, lambda *_: ("asked for",)
    try:
        yield
    finally:
        compiled_lane.static_reasons = reasons


def in_callback(backend: str) -> Callable[[], Turn]:
    """What prepares a chain of tiny calls by the callback lane, of a scale that no other call has."""

    def made() -> Turn:
        with by_callback():
            turn = hopper_jax.jax_chain(partial(jax_frontend.attention, causal=True, backend=backend, scale=0.126))
            turn(1)
        return turn

    return made


def _large(what: str) -> Group:
    note = f"{LARGE}; by the host's clock around a queue of 40 calls; {hopper_jax.REST} s of rest before each turn"
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
    note = f"{TINY}; one jitted program of {hopper_jax.CHAIN} calls, each on the last one's output, by the host's clock"
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
    """How often 10 runs of the chain launch a CUDA graph, and a kernel by itself, by JAX's profiler."""
    turn = hopper_jax.jax_chain(OURS)
    turn(3)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            turn(9)  # and one that a turn does not count
        (written,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(written))
        names = [event.name for plane in data.planes for line in plane.lines for event in line.events]
    return sum("GraphLaunch" in name for name in names), sum("LaunchKernel" in name for name in names)


def _call_site() -> Group:
    """Milliseconds of tracing and lowering that each further call site of a program costs, its kernel being there."""
    group = Group(
        "A call site", f"{TINY}; trace and lower, not XLA's compilation; of a program of 20 calls less one of 1"
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
    """What the callback lane adds to a call: JAX's time per call less torch's for the backend's own forward."""
    note = (
        f"{TINY}. JAX: one jitted program of {hopper_jax.CHAIN} calls, each on the last one's output. torch: the "
        "same chain of the backend's own forward(spec, inputs) in a Python loop. Both by the host's clock, until the "
        "last result is there, divided by the number of calls"
    )
    group = Group("The callback lane", note)
    makers: dict[str, Callable[[], Turn]] = {}
    for name in CALLED_BACK:
        makers[f"forward() in torch {name}"] = partial(_torch_chain, name)
        makers[f"attention in JAX {name}"] = in_callback(name)  # flash4 would be launched without one
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
    )  # raises every reason where the backend cannot run it
    module = backends.load(backend, "cuda")
    spec, forward = selection.spec, module.forward

    def chain() -> torch.Tensor:
        last = q
        for _ in range(hopper_jax.CHAIN):
            last, _ = forward(spec, Inputs(last, k, v))
        return last

    return host_turn(chain, hopper_jax.CHAIN)
