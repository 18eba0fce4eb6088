"""Whether each layer's attention is the same in torch and JAX, bit for bit, on the same q, k and v."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

import jax_frontend
import torch_frontend
from attn_core import Selection, SeqInfo
from examples.smollm2.torch_side import Captured


@dataclass(frozen=True)
class LayerCheck:
    """One layer in one step: are out and lse the same bytes, and how far apart are they if not."""

    layer: int
    queries: int
    out_equal: bool
    lse_equal: bool
    difference: float

    @property
    def equal(self) -> bool:
        return self.out_equal and self.lse_equal


def compare(captured: Sequence[Captured], on_layer: Callable[[], None] = lambda: None) -> list[LayerCheck]:
    """Feeds what each layer was given to ``torch_frontend.attention`` and to ``jax.jit(jax_frontend.attention)``."""
    compiled: dict[int, Callable[..., Any]] = {}  # one program per step: its layers share shapes and options
    checks = []
    for given in captured:
        run = compiled.setdefault(id(given.step), _jitted(given))
        bounds = given.step.seq_info()
        theirs = run(given.q, given.k, given.v, bounds.cu_seqlens_q, bounds.cu_seqlens_k)
        ours = torch_frontend.attention(*_tensors(given), **_options(given), return_lse=True)
        (out, lse), (jax_out, jax_lse) = ([np.asarray(x) for x in pair] for pair in (ours, theirs))
        checks.append(
            LayerCheck(
                given.layer,
                len(given.q),
                out_equal=_same_bytes(out, jax_out),
                lse_equal=_same_bytes(lse, jax_lse),
                difference=float(np.abs(out - jax_out).max()),
            )
        )
        on_layer()
    return checks


def selections(given: Captured) -> tuple[Selection, Selection]:
    """Which backend torch and JAX choose for a layer's call, and why not the others."""
    bounds = given.step.seq_info()
    in_torch = torch_frontend.explain(*_tensors(given), **_options(given))
    in_jax = jax_frontend.explain(given.q, given.k, given.v, causal=True, scale=given.scale, seq_info=bounds)
    return in_torch, in_jax


def _tensors(given: Captured) -> tuple[torch.Tensor, ...]:
    return tuple(torch.from_numpy(x) for x in (given.q, given.k, given.v))


def _options(given: Captured) -> dict[str, Any]:
    return {"causal": True, "scale": given.scale, "seq_info": given.step.seq_info(torch.from_numpy)}


def _jitted(given: Captured) -> Callable[..., Any]:
    bounds, scale = given.step.seq_info(), given.scale

    @jax.jit
    def run(q: jax.Array, k: jax.Array, v: jax.Array, cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array) -> Any:
        seq_info = SeqInfo(cu_seqlens_q, cu_seqlens_k, bounds.max_len_q, bounds.max_len_k)
        return jax_frontend.attention(q, k, v, causal=True, scale=scale, seq_info=seq_info, return_lse=True)

    return run


def _same_bytes(left: np.ndarray, right: np.ndarray) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
