"""Checks that the attention of each layer is equal in torch and JAX, bit for bit, on the same q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jax_frontend
import torch_frontend
from attn_core import Selection
from examples.smollm2.torch_side import Captured


@dataclass(frozen=True)
class LayerCheck:
    """The comparison of a layer in a step: whether out and lse are equal, and the largest difference of out."""

    layer: int
    queries: int
    out_equal: bool
    lse_equal: bool
    difference: float

    @property
    def equal(self) -> bool:
        return self.out_equal and self.lse_equal


def compare(captured: Sequence[Captured], on_layer: Callable[[], None] = lambda: None) -> list[LayerCheck]:
    """Repeats each captured call with ``torch_frontend.attention`` and ``jax.jit(jax_frontend.attention)``."""
    jitted = jax.jit(partial(jax_frontend.attention, return_lse=True), static_argnames=("causal", "scale", "backend"))
    checks = []
    for call in captured:
        backend = selections(call)[0].backend  # JAX may choose its own operations, whose bits differ
        options = {**_options(call, torch.from_numpy), "backend": backend}
        ours = torch_frontend.attention(*_tensors(call), **options, return_lse=True)
        theirs = jitted(*_arrays(call), **_options(call, jnp.asarray), backend=backend)
        (out, lse), (jax_out, jax_lse) = ([np.asarray(x) for x in pair] for pair in (ours, theirs))
        difference = float(np.abs(out - jax_out).max())
        equal = _same_bytes(out, jax_out), _same_bytes(lse, jax_lse)
        checks.append(LayerCheck(call.layer, len(call.q), *equal, difference))
        on_layer()
    return checks


def selections(call: Captured) -> tuple[Selection, Selection]:
    """Returns the backends that torch and JAX choose for a layer's call, with the reasons against the others."""
    in_torch = torch_frontend.explain(*_tensors(call), **_options(call, torch.from_numpy))
    in_jax = jax_frontend.explain(*_arrays(call), **_options(call, jnp.asarray))
    return in_torch, in_jax


def _tensors(call: Captured) -> list[torch.Tensor]:
    return [torch.from_numpy(x) for x in (call.q, call.k, call.v)]


def _arrays(call: Captured) -> list[jax.Array]:
    return [jnp.asarray(x) for x in (call.q, call.k, call.v)]


def _options(call: Captured, array: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """Returns the keywords of ``attention``, the same in both frameworks."""
    return {"causal": True, "scale": call.scale, "seq_info": call.step.seq_info(array)}


def _same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
