"""FlashAttention-4's softcap as score functions of our own, faster than the ones it ships.

The kernel hands a score function the scaled scores of a few (query, key) pairs and masks what comes back; its backward
hands a second function the gradients by the capped scores, and the scaled scores again. What it ships divides by the
cap, which is a subroutine call for each score. Here nothing is divided: the forward is given ``scale / cap`` for its
scale, the backward multiplies by the reciprocal, and the hyperbolic tangent is one instruction, PTX
``tanh.approx.f32`` (relative error up to 2**-11, the same as FlashAttention-2 and 3 use).

The kernel tells compiled code apart by each function's ``__cute_hash__``: a text that names the cap, so that two caps
never share a kernel and equal caps always do.
Upstream: flash-attn-4 >= 4.0.0b30 with nvidia-cutlass-dsl >= 4.6.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attn_core.backends.shared.cached_once import cached_once

Tanh = Callable[[Any], Any]


class ScoreFunctions(NamedTuple):
    """A softcap for FlashAttention-4.

    Attributes:
        forward: ``score_mod`` of a forward whose scale has been divided by the cap.
        again: ``score_mod`` of a backward, whose scale is the call's own.
        gradient: ``score_mod_bwd``, beside ``again``.
    """

    forward: Callable[..., Any]
    again: Callable[..., Any]
    gradient: Callable[..., Any]


def capped_share(share: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``share = s / cap``."""
    return tanh(share) * cap


def capped(score: Any, cap: float, tanh: Tanh) -> Any:
    """``cap * tanh(s / cap)`` from ``s``."""
    return capped_share(score * (1.0 / cap), cap, tanh)


def capped_gradient(gradient: Any, score: Any, cap: float, tanh: Tanh) -> Any:
    """The gradient by ``s`` from that by the capped score, whose derivative is ``1 - tanh(s / cap) ** 2``."""
    bent = tanh(score * (1.0 / cap))
    return gradient * (1.0 - bent * bent)


@cached_once
def score_functions(cap: float) -> ScoreFunctions:
    """The score functions of a cap, made once per process; needs the CuTe DSL.

    Of what the kernel passes after the scores (batch_idx, head_idx, q_idx, kv_idx, seqlen_info, aux_tensors) a softcap
    uses nothing.
    """

    def forward(scores: Any, *places: Any, **more: Any) -> Any:
        return _each(lambda score: capped_share(score, cap, tanh_approx), scores)

    def again(scores: Any, *places: Any, **more: Any) -> Any:
        return _each(lambda score: capped(score, cap, tanh_approx), scores)

    def gradient(gradients: Any, scores: Any, *places: Any, **more: Any) -> Any:
        return _each(lambda found, score: capped_gradient(found, score, cap, tanh_approx), gradients, scores)

    functions = ScoreFunctions(forward, again, gradient)
    for name, function in functions._asdict().items():
        function.__cute_hash__ = f"attn_core.softcap.{name}({cap!r})"
    return functions


def _each(function: Callable[..., Any], *vectors: Any) -> Any:
    """The function of every element of the kernel's vectors (``cute.TensorSSA``, float32, all of one shape)."""
    from cutlass import Float32, cute

    shape = vectors[0].shape
    cells = [cute.make_rmem_tensor(shape, Float32) for _ in vectors]
    for cell, vector in zip(cells, vectors, strict=True):
        cell.store(vector)
    for place in range(cute.size(shape)):  # unrolled while the kernel is traced
        cells[0][place] = function(*(cell[place] for cell in cells))
    return cells[0].load()


def tanh_approx(value: Any) -> Any:
    """The hyperbolic tangent of a ``cutlass.Float32`` in a kernel, as one instruction."""
    from cutlass import Float32
    from cutlass._mlir.dialects import llvm
    from cutlass.cutlass_dsl import T

    found = llvm.inline_asm(
        T.f32(),
        [Float32(value).ir_value()],
        "tanh.approx.f32 $0, $1;",
        "=f,f",
        has_side_effects=False,  # so that the backward's two uses become one instruction
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Float32(found)
