"""The values of an eager call as numpy arrays, for ``attn_core.checks``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.arguments import Arrays
from attn_core.call.checks import warn_of_values
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def check(spec: AttentionSpec, inputs: Inputs, info: SeqInfo | None) -> None:
    """Warns of mistakes in the values of a call. Does nothing while JAX traces, because there are no values."""
    if any(isinstance(array, jax.core.Tracer) for array in inputs):
        return
    tokens = None if info is None else int(info.cu_seqlens_q[-1])
    warn_of_values(spec, {name: _numpy(a) for name, a in zip(Arrays._fields, inputs, strict=False)}, tokens)


def _numpy(array: Any) -> Any:
    if array is None:
        return None
    return np.asarray(array.astype(jnp.float32) if array.dtype == jnp.bfloat16 else array)
