"""Compares attention() in torch on a GPU with the kernels that it calls, softcapped and in small calls, too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import torch_frontend
from benchmarks import dropins
from benchmarks import hopper_kernels as kernels
from benchmarks.hopper_group import LARGE, TINY, Group, Shape, Turn, event_turn, host_turn

FORWARD, TRAINING = "forward", "forward + backward"
SOFTCAP = 50.0
BARE = {
    FORWARD: {
        "flash2": kernels.flash2_op,
        "flash3": kernels.flash3_op,
        "flash4": kernels.flash4,
        "sdpa_cudnn": kernels.aten_cudnn,
        "sdpa_flash": kernels.aten_flash,
    },
    TRAINING: {
        "flash2": kernels.flash2,
        "flash3": kernels.flash3_function,
        "flash4": kernels.flash4,
        "sdpa_cudnn": kernels.aten_cudnn,
        "sdpa_flash": kernels.aten_flash,
    },
}
"""The most direct call of each backend's kernel; for training, a call that records its own gradient."""


def tensors(shape: Shape, what: str) -> tuple[torch.Tensor, ...]:
    """Returns q, k, v and dout, standard normal; q, k and v require a gradient unless ``what`` is a forward."""
    generator = torch.Generator("cuda").manual_seed(0)
    made = [
        torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)
        for size in (shape.query, shape.key, shape.key, shape.query)
    ]
    return *(tensor.requires_grad_(what != FORWARD) for tensor in made[:3]), made[3]


def runner(function: Callable[..., Any], shape: Shape, what: str) -> Callable[[], Any]:
    """Returns a call without arguments: the forward, or the forward and the gradients of q, k and v."""
    q, k, v, dout = tensors(shape, what)
    if what != TRAINING:
        return lambda: function(q, k, v)
    return lambda: torch.autograd.grad(function(q, k, v), (q, k, v), dout)


def turn_of(
    make: Callable[[], Callable[..., Any]], what: str, shape: Shape = LARGE, clock: Callable[..., Turn] = event_turn
) -> Callable[[], Turn]:
    """Returns a function that prepares a candidate, from one that prepares the candidate's function."""
    return lambda: clock(runner(make(), shape, what))


def ours(backend: str | None, what: str, shape: Shape = LARGE, **options: Any) -> Callable[[], Turn]:
    """Returns a function that prepares ``attention`` on a backend, or on the automatic choice."""
    return turn_of(lambda: partial(torch_frontend.attention, causal=True, backend=backend, **options), what, shape)


def automatic_choice(what: str, **options: Any) -> str | None:
    """Returns the backend that ``attention`` chooses for the large shape."""
    q, k, v, _ = tensors(LARGE, what)
    return torch_frontend.explain(q, k, v, causal=True, **options).backend


def attention_beside_kernels() -> list[Group]:
    """Compares attention() with the bare kernel call, forward and training, at the large shape."""
    return [_beside_kernels(FORWARD, 680.0, "flash3"), _beside_kernels(TRAINING, 505.0, "flash4")]


def _beside_kernels(what: str, tflops_goal: float, fastest: str) -> Group:
    group = Group(f"attention() beside the bare kernels, {what}", str(LARGE), LARGE.flops(what))
    makers = {f"bare {name}": turn_of(make, what) for name, make in BARE[what].items()}
    makers |= {f"attention {name}": ours(name, what) for name in BARE[what]}
    makers["attention"] = ours(None, what)
    group.measure(makers, calls=20, rounds=9)
    chosen = automatic_choice(what)
    name = f"automatic choice ({chosen}) beside its bare kernel"
    if chosen in BARE[what]:
        group.speed(name, "attention", f"bare {chosen}", 0.98)
    else:
        group.missing(name, f"not run: no bare call of {chosen} is measured", ">= 0.98")
    for backend in BARE[what]:
        goal = 0.98 if backend in ("flash3", "flash4") else None
        group.speed(f"backend={backend!r} beside its bare kernel", f"attention {backend}", f"bare {backend}", goal)
    group.tflops("automatic choice", "attention", tflops_goal, beside=f"bare {fastest}")
    return group


def softcap_speed() -> list[Group]:
    """Compares softcap=50 at the large shape: FlashAttention-4 (ours, as shipped), FlashAttention-2, FlexAttention."""
    return [_softcap(FORWARD, 480.0), _softcap(TRAINING, 420.0)]


def _softcap(what: str, goal: float) -> Group:
    group = Group(f"softcap {SOFTCAP:g}, {what}", f"{LARGE}; FlexAttention compiled", LARGE.flops(what))
    makers = {
        "bare flash2": turn_of(partial(kernels.flash2, SOFTCAP), what),
        "flash4 as shipped": turn_of(partial(kernels.flash4, SOFTCAP), what),
        "FlexAttention": turn_of(partial(kernels.flex, LARGE.seq, SOFTCAP), what),
        "attention flash2": ours("flash2", what, softcap=SOFTCAP),
        "attention flash4": ours("flash4", what, softcap=SOFTCAP),
        "attention": ours(None, what, softcap=SOFTCAP),
    }
    group.measure(makers, calls=10, rounds=9)
    group.tflops("backend='flash4'", "attention flash4", goal, beside="flash4 as shipped")
    group.tflops(f"automatic choice ({automatic_choice(what, softcap=SOFTCAP)})", "attention")
    for other in ("flash4 as shipped", "bare flash2", "FlexAttention"):
        group.speed(f"backend='flash4' beside {other}", "attention flash4", other)
    return group


SMALL = {**BARE[FORWARD], "sdpa_efficient": kernels.aten_efficient}
SMALL_TRAINED = {**BARE[TRAINING], "sdpa_efficient": kernels.aten_efficient}


def small_calls() -> list[Group]:
    """Measures the overhead of eager calls of attention() over the bare call, with a kernel of almost no time."""
    return [_small_calls(what) for what in ("no gradient", "forward, gradient recorded", TRAINING)]


def _small_calls(what: str) -> Group:
    group = Group(
        f"Small eager calls, {what}",
        f"{TINY}; by the host's clock: the host's time or the kernel's, if that is longer",
    )
    bare = SMALL if what == "no gradient" else SMALL_TRAINED
    shapes = FORWARD if what == "no gradient" else what

    def turn(make: Callable[[], Callable[..., Any]]) -> Callable[[], Turn]:
        return lambda: host_turn(runner(make(), TINY, shapes))

    def attention(backend: str) -> Callable[..., Any]:
        return partial(torch_frontend.attention, causal=True, backend=backend)

    makers = {f"bare {name}": turn(make) for name, make in bare.items()}
    makers |= {f"attention {name}": turn(partial(attention, name)) for name in bare}
    group.measure(makers, calls=500, rounds=9)
    for name in bare:
        group.extra(f"backend={name!r}", f"attention {name}", f"bare {name}")
    return group


def dropins_beside_attention() -> list[Group]:
    """Measures the overhead of each drop-in's call over attention() itself, on the host, without gradients."""
    groups = []
    with torch.no_grad():
        shape = (TINY.batch, TINY.seq, TINY.heads, TINY.head_dim)
        for name, pair in dropins.calls(shape, "cuda", torch.bfloat16).items():
            group = Group(f"Drop-in: {name}", f"{TINY}, by the host's clock; both on views of the same tensors")
            runs = {"attention": pair.attention, "attention by the drop-in": pair.dropin}
            makers = {key: partial(host_turn, run, pair.times) for key, run in runs.items()}
            group.measure(makers, calls=1000 // pair.times, rounds=15)
            group.extra("a call", "attention by the drop-in", "attention", 10.0)
            groups.append(group)
    return groups
