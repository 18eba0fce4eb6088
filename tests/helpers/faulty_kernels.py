"""Faulty kernels: a backend whose forward or backward raises or returns something wrong, for tests of what callers
see; and one small call in every way in which the frontends run it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from frameworks import JAX, TORCH, as_numpy, replaced

from attn_core import backends
from attn_core.call.tensors import Inputs

BATCH, LENGTH, HEADS, DIM = 2, 5, 3, 8
OUT_SHAPE, LSE_SHAPE = (BATCH, LENGTH, HEADS, DIM), (BATCH, HEADS, LENGTH)
X = np.random.default_rng(0).standard_normal(OUT_SHAPE).astype(np.float32)

Fault = Callable[[Any], Any]
"""Takes what the kernel returns and returns something else, or raises."""


class Kernel:
    """A backend's function with a fault.

    Args:
        function: the backend's own.
        fault: applied to the results of the faulty runs.
        runs: the faulty runs, counted from 1; None for all.

    Attributes:
        count: the runs so far.
    """

    def __init__(self, function: Callable[..., Any], fault: Fault, runs: tuple[int, ...] | None = None) -> None:
        self._function, self._fault, self._runs, self.count = function, fault, runs, 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        results = self._function(*arguments, **named)
        return self._fault(results) if self._runs is None or self.count in self._runs else results


@contextmanager
def faulty(
    backend: str, direction: str, fault: Fault, runs: tuple[int, ...] | None = None, *, shortcut: bool = False
) -> Iterator[Kernel]:
    """A backend on the CPU with a fault in its "forward" or "backward".

    Args:
        runs: the faulty runs of the kernel, counted from 1; None for all.
        shortcut: whether eager calls of torch without gradients reach the fault through the backend's shortcut. If not,
            the backend has none.
    """
    record = backends.load(backend, "cpu")
    kernel = Kernel(getattr(record, direction), fault, runs)

    def offer(spec: Any) -> Any:
        return (lambda *tensors: kernel(spec, Inputs(*tensors))) if shortcut else None

    with replaced(record, **{direction: kernel, "shortcut": offer}):
        yield kernel


def raising(error: type[Exception], *words: Any) -> Fault:
    """A fault that raises a new error every time."""

    def fault(results: Any) -> Any:
        raise error(*words)

    return fault


def with_result(index: int, change: Callable[[Any], Any]) -> Fault:
    """A fault that changes one result: 0 is out or dq, 1 is lse or dk."""

    def fault(results: Any) -> Any:
        listed = list(results)
        listed[index] = change(listed[index])
        return type(results)(*listed) if hasattr(results, "_fields") else tuple(listed)

    return fault


FROM_XLA = (jax.errors.JaxRuntimeError, ValueError)
"""The types of an error in a program that runs. JAX raises ValueError if its compiled dispatch starts the program, from
the second run on."""


class Way(NamedTuple):
    """One way to run the call.

    Attributes:
        run: (direction, backend) -> the output or the gradient of q, as a numpy array.
        bridged: whether XLA runs the kernel, so that errors arrive as its own.
    """

    run: Callable[[str, str | None], np.ndarray]
    bridged: bool


def _attend_in_torch(q: torch.Tensor, backend: str | None) -> torch.Tensor:
    k = torch.from_numpy(X)
    return TORCH.frontend.attention(q, k, k, layout="bshd", causal=True, backend=backend)


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """One program for all tests: a fault comes and goes while a program exists."""
    torch._dynamo.reset()
    return torch.compile(_attend_in_torch, fullgraph=True, backend="aot_eager")


def _torch_call(direction: str, backend: str | None, compiled: bool) -> np.ndarray:
    attend = _compiled() if compiled else _attend_in_torch
    q = TORCH.array(X)
    if direction == "forward":
        return as_numpy(attend(q, backend))
    q.requires_grad_()
    return as_numpy(torch.autograd.grad(attend(q, backend).sum(), q)[0])


def _jax_call(direction: str, backend: str | None, compiled: bool) -> np.ndarray:
    k = JAX.array(X)

    def attend(q: jax.Array) -> jax.Array:
        return JAX.frontend.attention(q, k, k, layout="bshd", causal=True, backend=backend)

    function = attend if direction == "forward" else jax.grad(lambda q: attend(q).sum())
    return as_numpy((jax.jit(function) if compiled else function)(JAX.array(X)))


WAYS = {
    "torch eager": Way(lambda direction, backend: _torch_call(direction, backend, False), False),
    "torch compiled": Way(lambda direction, backend: _torch_call(direction, backend, True), False),
    "jax eager": Way(lambda direction, backend: _jax_call(direction, backend, False), True),
    "jax jit": Way(lambda direction, backend: _jax_call(direction, backend, True), True),
}
"""The ways in which a kernel of torch can run. Those of JAX cross the bridge by callback."""


def text_of(error: BaseException) -> str:
    """The words of an error and its notes, as a traceback shows them."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])
