"""Compares jitted calls in JAX on a GPU with torch on the same kernel, and with JAX's own attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jax_frontend
import torch_frontend
from benchmarks import hopper_torch
from benchmarks.hopper_group import LARGE, TINY, Group, Shape, Turn, host_turn, jax_turn
from benchmarks.hopper_torch import FORWARD, TRAINING

CHAIN = 24
GOALS = {FORWARD: 1.15, TRAINING: 1.10}
"""The goals for the speed relative to jax.nn with cuDNN."""
REST = 0.3
"""Seconds before each turn at the large shape."""


def jax_beside_torch() -> list[Group]:
    """Compares jitted attention at the large shape with torch on the same backend, jax.nn with cuDNN, and tokamax."""
    return [
        _beside_torch(FORWARD, named=("flash3", "flash4"), fastest="flash3"),
        _beside_torch(TRAINING, named=("flash4",), fastest="flash4"),
    ]


def _beside_torch(what: str, named: tuple[str, ...], fastest: str) -> Group:
    note = (
        f"{LARGE}; the host's clock times a queue of 40 calls until the last result is ready; {REST} s of rest before "
        "each turn, because a GPU is slower after a kernel that drew much power"
    )
    group = Group(f"JAX under jit, {what}", note, LARGE.flops(what))
    ours = partial(jax_frontend.attention, causal=True)
    jax_nn = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    makers: dict[str, Callable[[], Turn]] = {}
    for name in named:
        call = partial(torch_frontend.attention, causal=True, backend=name)
        makers[f"attention in torch {name}"] = hopper_torch.turn_of(lambda call=call: call, what, clock=host_turn)  # type: ignore[misc]
        makers[f"attention in JAX {name}"] = partial(jitted, partial(ours, backend=name), what)
    makers["attention in JAX"] = partial(jitted, ours, what)
    makers["jax.nn cudnn"] = partial(jitted, jax_nn, what)
    makers["tokamax mosaic"] = lambda: jitted(tokamax(), what)
    group.measure(makers, calls=40, rounds=9, rest=REST)
    for name in named:
        group.speed(f"backend={name!r} beside torch", f"attention in JAX {name}", f"attention in torch {name}", 0.97)
    group.speed(f"backend={fastest!r} beside jax.nn", f"attention in JAX {fastest}", "jax.nn cudnn", GOALS[what])
    chosen = choice(LARGE, what)
    group.speed(f"automatic choice ({chosen}) beside jax.nn", "attention in JAX", "jax.nn cudnn", GOALS[what])
    group.speed(f"automatic choice ({chosen}) beside tokamax", "attention in JAX", "tokamax mosaic", 1.0)
    return group


def tokamax() -> Callable[..., Any]:
    import tokamax

    return partial(tokamax.dot_product_attention, is_causal=True, implementation="mosaic")


def choice(shape: Shape, what: str) -> str | None:
    """Returns the backend that automatic choice takes in JAX."""
    q, k, v, _ = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in sizes(shape))
    return jax_frontend.explain(q, k, v, causal=True, needs_backward=what == TRAINING).backend


def sizes(shape: Shape) -> tuple[tuple[int, ...], ...]:
    return (shape.query, shape.key, shape.key, shape.query)


def arrays(shape: Shape) -> list[jax.Array]:
    """Returns q, k, v and dout, standard normal."""
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, size, jnp.bfloat16) for key, size in zip(keys, sizes(shape), strict=True)]


def jitted(function: Callable[..., Any], what: str, shape: Shape = LARGE, calls: int = 1) -> Turn:
    """Compiles a function of q, k and v, or its output and gradients; it contains ``calls`` calls of attention."""
    q, k, v, dout = arrays(shape)
    if what == FORWARD:
        forward = jax.jit(function)
        return jax_turn(lambda: forward(q, k, v), calls)

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(dout)

    both = jax.jit(gradients)
    return jax_turn(lambda: both(q, k, v, dout), calls)


def chained(function: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Returns a chain of ``calls`` calls, each on the output of the last one."""

    def chain(last: Any, k: Any, v: Any) -> Any:
        for _ in range(calls):
            last = function(last, k, v)
        return last

    return chain


def jax_chain(function: Callable[..., Any]) -> Turn:
    """Compiles a chain of tiny calls."""
    return jitted(chained(function, CHAIN), FORWARD, TINY, CHAIN)
