"""Our own score functions for FlashAttention-4's softcap, faster than upstream's.

The kernel passes the scaled scores of a few (query, key) pairs to a score function and masks the result; its backward
passes the gradients of the capped scores and the scaled scores to a second function. Upstream's functions divide by
the cap, which is a subroutine call per score. Ours divide nothing: the forward runs with ``scale / cap`` as its scale,
the backward multiplies by the reciprocal, and the hyperbolic tangent is one instruction, PTX ``tanh.approx.f32``
(relative error up to 2**-11; FlashAttention-2 and 3 use the same).

The kernel identifies compiled code by each function's ``__cute_hash__``. Ours names the cap, so that two caps never
share a kernel and equal caps always do.
Upstream: flash-attn-4 >= 4.0.0b30 with nvidia-cutlass-dsl >= 4.6.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.expressions.on_cute import tanh_approx

Tanh = Callable[[Any], Any]


class ScoreFunctions(NamedTuple):
    """A softcap for FlashAttention-4.

    Attributes:
        forward: ``score_mod`` of the forward, whose scale is divided by the cap.
        recompute: ``score_mod`` of the backward, whose scale is the call's own.
        gradient: ``score_mod_bwd`` of the backward.
    """

    forward: Callable[..., Any]
    recompute: Callable[..., Any]
    gradient: Callable[..., Any]


def capped_share(share: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``share = s / cap``."""
    return tanh(share) * cap


def capped(score: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``s``."""
    return capped_share(score * (1.0 / cap), cap, tanh)


def capped_gradient(gradient: Any, score: Any, cap: float, tanh: Tanh) -> Any:
    """Returns the gradient of ``s`` from the gradient of the capped score; the factor is ``1 - tanh(s / cap) ** 2``."""
    bent = tanh(score * (1.0 / cap))
    return gradient * (1.0 - bent * bent)


@lru_cache(maxsize=64)  # a cap that comes back after 64 others gets equal functions, so nothing compiles again
def score_functions(cap: float) -> ScoreFunctions:
    """Returns the score functions of a cap. Needs the CuTe DSL.

    A softcap ignores the kernel's other arguments (batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors).
    """

    def forward(scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, score: capped_share(score, cap, tanh_approx), scores)

    def recompute(scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, score: capped(score, cap, tanh_approx), scores)

    def gradient(gradients: Any, scores: Any, *places: Any, **more: Any) -> Any:
        return each_pair(lambda _, dscore, score: capped_gradient(dscore, score, cap, tanh_approx), gradients, scores)

    functions = ScoreFunctions(forward, recompute, gradient)
    for name, function in functions._asdict().items():
        function.__cute_hash__ = f"attn_core.softcap.{name}({cap!r})"
    return functions


def each_pair(function: Callable[..., Any], *vectors: Any) -> Any:
    """Applies ``function(pair, *elements)`` to every pair of a query and a key in the kernel's vectors.

    Args:
        vectors: ``cute.TensorSSA`` of float32, all of one shape.
    """
    from cutlass import Float32, cute

    shape = vectors[0].shape
    cells = [cute.make_rmem_tensor(shape, Float32) for _ in vectors]
    for cell, vector in zip(cells, vectors, strict=True):
        cell.store(vector)
    for pair in range(cute.size(shape)):  # unrolled while the kernel is traced
        cells[0][pair] = function(pair, *(cell[pair] for cell in cells))
    return cells[0].load()
