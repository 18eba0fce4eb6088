"""torch and JAX under equal names, for tests that hold both frontends to one contract; and a spy on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both_frontends import jax_array, jax_device

import jax_frontend
import torch_frontend
from attn_core import backends
from attn_core.backends.shared import caches


class Framework(NamedTuple):
    """One frontend, and how to create its arrays on a device."""

    name: str
    frontend: Any
    array: Callable[..., Any]
    """(array-like, dtype=None) -> an array of the framework; without a dtype, with that of the array-like."""
    device: str = "cpu"

    def gradients(
        self,
        function: Callable[..., Any],
        arrays: dict[str, Any],
        *cotangents: Any,
        between: Callable[[], None] = lambda: None,
    ) -> list[np.ndarray]:
        """The outputs of ``function(**arrays)``, and the gradients of all arrays for the outputs' gradients, in numpy.

        Arrays and cotangents are given in numpy; the function gets arrays of the framework.

        Args:
            cotangents: the gradients of the outputs; without, each output is its own.
            between: runs between the function and its backward.
        """
        given, downstream = (
            {name: self.array(each) for name, each in arrays.items()},
            tuple(map(self.array, cotangents)),
        )

        def tupled(given: dict[str, Any]) -> tuple[Any, ...]:
            outputs = function(**given)
            return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)

        if self.name == "torch":
            outputs = tupled({name: each.requires_grad_() for name, each in given.items()})
            between()
            downstream = downstream or tuple([each.detach() for each in outputs])
            found = dict(zip(given, torch.autograd.grad(outputs, list(given.values()), downstream), strict=True))
        else:
            outputs, pull = jax.vjp(tupled, given)
            between()
            (found,) = pull(downstream or outputs)
        return [as_numpy(each) for each in (*outputs, *(found[name] for name in given))]

    def arrays(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Keywords with arrays of the framework in the place of numpy's."""
        return {name: self.array(each) if isinstance(each, np.ndarray) else each for name, each in keywords.items()}

    @property
    def namespace(self) -> Any:
        """``torch`` or ``jax.numpy``, whose functions have equal names."""
        return torch if self.name == "torch" else jnp

    def zeros(self, *shape: int, dtype: str = "float32") -> Any:
        return self.array(np.zeros(shape, np.float32), dtype)

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """In the block JAX computes on the framework's device, as torch does with a tensor on it."""
        with jax_on(self.device) if self.name == "jax" else nullcontext():
            yield

    @property
    def other(self) -> Framework:
        return next(each for each in ALL if each.device == self.device and each.name != self.name)

    @property
    def device_name(self) -> str:
        """The name of the device in the frontend's plans: ``"cpu"``, or a GPU's compute capability such as
        ``"sm90"``."""
        plan = import_module(f"{self.name}_frontend.dispatch.plan")
        return plan.device_name(self.zeros(1) if self.name == "jax" else self.zeros(1).device)

    def __str__(self) -> str:
        return self.name if self.device == "cpu" else f"{self.name}-{self.device}"


def _torch_array(values: Any, dtype: str | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(values))
    return tensor if dtype is None else tensor.to(getattr(torch, dtype))


def _torch_array_on_gpu(values: Any, dtype: str | None = None) -> torch.Tensor:
    return _torch_array(values, dtype).to("cuda")


def _jax_array_on_gpu(values: Any, dtype: str | None = None) -> jax.Array:
    return jax.device_put(jax_array(values, dtype), jax_device("cuda"))


TORCH = Framework("torch", torch_frontend, _torch_array)
JAX = Framework("jax", jax_frontend, jax_array)
BOTH = (TORCH, JAX)
TORCH_ON_GPU = Framework("torch", torch_frontend, _torch_array_on_gpu, "cuda")
JAX_ON_GPU = Framework("jax", jax_frontend, _jax_array_on_gpu, "cuda")
ALL = (*BOTH, TORCH_ON_GPU, JAX_ON_GPU)
EVERYWHERE = (*BOTH, *(pytest.param(framework, marks=pytest.mark.cuda) for framework in (TORCH_ON_GPU, JAX_ON_GPU)))
"""Both frontends on the CPU and on a GPU, as params."""


@contextmanager
def jax_on(device: str) -> Iterator[None]:
    """JAX on a kind of device with full float32 products: a GPU's default rounds to TF32."""
    with jax.default_device(jax_device(device)), jax.default_matmul_precision("highest"):
        yield


def as_numpy(array: Any) -> np.ndarray:
    """An array of either framework as numpy; bfloat16 as float32."""
    if isinstance(array, torch.Tensor):
        array = array.detach().cpu()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)


@contextmanager
def spied() -> Iterator[list[str]]:
    """The names of the backends whose forward runs in the block, in order.

    Kernels that XLA launches without Python, from JAX on a GPU, are not seen.
    """
    ran: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **keywords: Any) -> Any:
            ran.append(name)
            return function(*arguments, **keywords)

        return run

    def watched_shortcut(name: str, shortcut: Callable[..., Any]) -> Callable[..., Any]:
        def offer(spec: Any) -> Any:
            offered = shortcut(spec)
            return None if offered is None else watched(name, offered)

        return offer

    others = {}
    for name in backends.names():
        for record in backends.records(name).values():
            seen: dict[str, Any] = {"forward": watched(name, record.forward)}
            if record.shortcut is not None:
                seen["shortcut"] = watched_shortcut(name, record.shortcut)
            if record.pages is not None:
                seen["pages"] = replace(record.pages, shortcut=watched_shortcut(name, record.pages.shortcut))
            others[record] = replace(record, **seen)
    with _exchanged(others, programs=True):
        yield ran


@contextmanager
def replaced(record: backends.Backend, **fields: Any) -> Iterator[None]:
    """A backend's record with other fields. No cache keeps anything from before the block or from within it."""
    backends.availability.cache_clear()
    try:
        with _exchanged({record: replace(record, **fields)}, programs=record.framework == "jax"):
            yield
    finally:
        backends.availability.cache_clear()


@contextmanager
def _exchanged(others: dict[backends.Backend, backends.Backend], programs: bool) -> Iterator[None]:
    """Lets ``load`` return other records in the block."""
    actual = backends._record

    def record(name: str, kind: str) -> backends.Backend:
        found = actual(name, kind)
        return others.get(found, found)

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(import_module("jax_frontend.bridge.targets"), "_callbacks", {})
            patch.setattr(backends, "_record", record)
            empty_plan_caches(programs)
            yield
    finally:
        empty_plan_caches(programs)


@contextmanager
def registered(*records: backends.Backend) -> Iterator[None]:
    """Registers backends for the block. Nothing keeps them afterwards."""
    try:
        for record in records:
            backends.register_backend(record)
        yield
    finally:
        for record in records:
            backends._plug_ins.pop(record.name, None)
        empty_plan_caches()
        for cache in (backends.availability, backends.installed_build):
            cache.cache_clear()


def empty_plan_caches(programs: bool = True) -> None:
    """Empties the caches of plans, and all others of what follows from the backends' records.

    Args:
        programs: whether to empty JAX's caches as well. A program that JAX has traced through a backend of its own does
            not look the backend up again; a program with a callback does.
    """
    caches.forget()
    if programs:
        jax.clear_caches()
