"""The dropout of a call of an NNX layer: its rate, and the key that it draws."""

from __future__ import annotations

from typing import Any

from flax import nnx

from attn_core.errors import SpecError


def dropout_of_call(layer: Any, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> tuple[float, Any]:
    """Returns the dropout rate and key of this call."""
    if layer.dropout_rate == 0:
        return 0.0, None
    off = layer.deterministic if deterministic is None else deterministic
    if off is None:
        raise SpecError(
            f"deterministic=None with dropout_rate={layer.dropout_rate}: expected True or False, in the layer, the "
            "call, or by train() and eval()"
        )
    if off:
        return 0.0, None
    stream = layer.rngs if rngs is None else rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
    if stream is None:
        raise SpecError("rngs=None: expected nnx.Rngs in the call, because the layer has keep_rngs=False")
    return layer.dropout_rate, stream()
