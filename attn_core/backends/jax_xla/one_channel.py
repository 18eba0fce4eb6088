"""Calls of one channel as calls of two, for ``fixed_tiles``.

XLA makes sums of a product of one column, and fuses them with what is beside them in a program, so their bits would
depend on the program.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def of_two_channels(spec: AttentionSpec) -> AttentionSpec:
    """Returns the call with two channels instead of one."""
    return replace(spec, head_dim=max(spec.head_dim, 2), value_dim=max(spec.value_dim, 2))


def filled_inputs(wider: AttentionSpec, inputs: Inputs) -> Inputs:
    """Returns the inputs of the call with two channels."""
    q, k, v = inputs[:3]
    return inputs._replace(q=filled(q, wider.head_dim), k=filled(k, wider.head_dim), v=filled(v, wider.value_dim))


def filled(array: Any, channels: int) -> Any:
    """Returns an array with 0 behind its channels, the last axis."""
    import jax.numpy as jnp

    return jnp.pad(array, (*[(0, 0)] * (array.ndim - 1), (0, channels - array.shape[-1])))
