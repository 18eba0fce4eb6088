"""Rows of a batch whose keys or values hold a NaN or Inf, computed again so that a hidden key reaches nobody.

A kernel that gives a hidden key the weight 0 adds ``0 * NaN`` for it, and a NaN score that is masked by adding stays
NaN. So what such a kernel made of these rows is replaced by plain attention, in which a hidden key is in no sum. The
other rows keep the kernel's bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from attn_core.backends.shared import plain_attention
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


def contain(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any) -> None:
    """Computes such rows of a dense forward again, and writes them into ``out`` and ``lse``."""
    for row in _broken_rows(inputs.k, inputs.v):
        part, part_lse = plain_attention.forward(_row_spec(spec), _row_inputs(inputs, row))
        out[row], lse[row] = part[0], part_lse[0]


def contain_gradients(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, gradients: tuple[Any, Any, Any]
) -> None:
    """Computes dq, dk and dv of such rows again, and writes them into ``gradients``."""
    for row in _broken_rows(inputs.k, inputs.v):
        saved = [tensor[row : row + 1] for tensor in (out, lse, dout)]
        part = plain_attention.backward(_row_spec(spec), _row_inputs(inputs, row), saved[0], saved[1], saved[2], None)
        for gradient, again in zip(gradients, part[:3], strict=True):
            gradient[row] = again[0]


def _broken_rows(k: Any, v: Any) -> list[int]:
    """The rows of ``[batch, kv_len, kv_heads, dim]`` in which k or v may hold a NaN or Inf; no broken row is missed.

    A sum is NaN or Inf where one of its terms is. A sum of large finite numbers may be Inf as well, and then plain
    attention runs without need.
    """
    import torch

    if isinstance(k, _valueless()):
        return []
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    if math.isfinite(k.sum(dtype=wide) + v.sum(dtype=wide)):
        return []
    sums = k.sum(dim=(1, 2, 3), dtype=wide) + v.sum(dim=(1, 2, 3), dtype=wide)
    return torch.nonzero(~sums.isfinite()).flatten().tolist()


@cache
def _valueless() -> type:
    """The kind of tensors that have shapes and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor


@lru_cache(maxsize=4096)
def _row_spec(spec: AttentionSpec) -> AttentionSpec:
    def cut(shape: Any) -> Any:
        return shape and (1, *shape[1:])

    return replace(spec, batch=1, mask_shape=cut(spec.mask_shape), bias_shape=cut(spec.bias_shape))


def _row_inputs(inputs: Inputs, row: int) -> Inputs:
    def cut(table: Any) -> Any:
        return table if table is None or table.shape[0] == 1 else table[row : row + 1]

    q, k, v = (tensor[row : row + 1] for tensor in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, mask=cut(inputs.mask), bias=cut(inputs.bias))
