"""Forward over reverse: the tangents of ``plain_attention.backward``, whose operations torch differentiates.

out and lse are arguments with tangents of their own, as the forward returned them.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from attn_core.backends.shared.autograd import recording
from attn_core.backends.shared.plain.attention import backward
from attn_core.backends.shared.plain.block_operands import SavedTensors
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, Tangents


def gradient_tangents(
    spec: AttentionSpec, inputs: Inputs, saved: SavedTensors, tangents: Tangents, moved: SavedTensors
) -> Gradients:
    """Returns the tangents of a call's gradients, in the shapes and dtypes of the gradients; 0 for rows without keys.

    Args:
        saved: out, lse and the incoming gradients of ``backward``; dlse may be None.
        tangents: of the call's tensors. moved: of the saved ones. None is a zero.
    """
    from torch.autograd import forward_ad

    # A transform of the caller may have opened a level, of which torch has one; its tensors are not seen here.
    level = nullcontext() if forward_ad._current_level >= 0 else forward_ad.dual_level()
    with recording(), forward_ad._set_fwd_grad_enabled(True), level:
        moving = {name.removeprefix("d"): tangent for name, tangent in tangents._asdict().items()}
        of_call = {name: _dual(getattr(inputs, name), tangent) for name, tangent in moving.items()}
        out, lse, dout, dlse = map(_dual, saved, moved)
        results = backward(spec, inputs._replace(**of_call), out, lse, dout, dlse, differentiable=True)
        return Gradients(*map(_tangent, results))


def _dual(primal: Any, tangent: Any) -> Any:
    """Returns a tensor that carries a tangent alone, and not one of its own from the caller's level; None is a zero."""
    import torch
    from torch.autograd import forward_ad

    if tangent is None:
        return None if primal is None else forward_ad.unpack_dual(primal).primal
    primal = torch.zeros_like(tangent) if primal is None else forward_ad.unpack_dual(primal).primal
    return forward_ad.make_dual(primal, tangent.to(primal.dtype))


def _tangent(dual: Any) -> Any:
    """Returns the tangent of a gradient, zeros if it depends on nothing that moves; None for None."""
    import torch
    from torch.autograd import forward_ad

    if dual is None:
        return None
    primal, tangent = forward_ad.unpack_dual(dual)
    return torch.zeros_like(primal) if tangent is None else tangent
