"""torch and JAX by the same names, for tests that hold both frontends to one contract; and a spy on every backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_frontend
import torch_frontend
from attn_core import backends


class Framework(NamedTuple):
    """One frontend and how to make its arrays."""

    name: str
    frontend: Any
    array: Callable[..., Any]
    """(array-like, dtype=None) -> an array of the framework, of the array-like's dtype unless one is named."""

    def zeros(self, *shape: int, dtype: str = "float32") -> Any:
        return self.array(np.zeros(shape, np.float32), dtype)

    @property
    def other(self) -> Framework:
        return JAX if self is TORCH else TORCH

    def __str__(self) -> str:
        return self.name


def _torch_array(values: Any, dtype: str | None = None) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(values))
    return tensor if dtype is None else tensor.to(getattr(torch, dtype))


def _jax_array(values: Any, dtype: str | None = None) -> jax.Array:
    return jnp.asarray(np.array(values), dtype=dtype)


TORCH = Framework("torch", torch_frontend, _torch_array)
JAX = Framework("jax", jax_frontend, _jax_array)
BOTH = (TORCH, JAX)


def as_numpy(array: Any) -> np.ndarray:
    """An array of either framework as numpy; bfloat16 as float32."""
    if isinstance(array, torch.Tensor):
        array = array.detach()
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    return np.asarray(array)


@contextmanager
def spied(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the backends whose forward runs in the block, in order.

    Plans hold references to the functions that are replaced here, so the caches of plans are emptied before and after.
    """
    ran: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            ran.append(name)
            return function(*arguments)

        return run

    def watched_shortcut(name: str, shortcut: Callable[..., Any]) -> Callable[..., Any]:
        def offer(spec: Any) -> Any:
            offered = shortcut(spec)
            return None if offered is None else watched(name, offered)

        return offer

    for name in backends.built():
        module: Any = backends.load(name)
        patch.setattr(module, "forward", watched(name, module.forward))
        if hasattr(module, "shortcut"):
            patch.setattr(module, "shortcut", watched_shortcut(name, module.shortcut))
    patch.setattr(import_module("jax_frontend.bridge"), "_callbacks", {})
    forget_plans()
    try:
        yield ran
    finally:
        forget_plans()


def forget_plans() -> None:
    """Empties the frontends' caches of plans, and of the programs that were traced from them."""
    for name in ("torch_frontend.plan", "jax_frontend.plan"):
        module = import_module(name)
        module.plan.cache_clear()
        if hasattr(module, "dense_plan"):
            module.dense_plan.cache_clear()
    import_module("jax_frontend.attention").compiled.clear_cache()  # what eager calls were traced with
