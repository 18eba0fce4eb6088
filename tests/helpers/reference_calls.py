"""A call for the float64 reference from its arrays: what a host's call means."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core import AttentionSpec, SeqInfo
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference


def reference_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    slopes: Any = None,
    sinks: Any = None,
    lengths: Any = None,
    **fields: Any,
) -> tuple[AttentionSpec, Inputs]:
    """The spec and the inputs of a call.

    Args:
        q, k, v: ``[batch, length, heads, head_dim]``.
        mask, bias: of four axes; slopes: ``[heads]`` or ``[batch, heads]``; sinks: ``[heads]``.
        lengths: of documents in the rows laid end to end, the same for queries and keys.
        fields: others of the spec.
    """
    q, k, v, mask, bias = (None if array is None else np.asarray(array) for array in (q, k, v, mask, bias))
    offsets = None
    if lengths is not None:
        q, k, v = (array.reshape(-1, *array.shape[-2:]) for array in (q, k, v))
        offsets = SeqInfo.from_lengths(lengths).cu_seqlens_q
        fields |= {"batch": 1, "documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    sizes: dict[str, Any] = {"batch": len(q), "q_len": q.shape[-3], "kv_len": k.shape[-3], "dtype": "float32"}
    sizes |= {"num_heads": q.shape[-2], "num_kv_heads": k.shape[-2], "head_dim": q.shape[-1], "value_dim": v.shape[-1]}
    spec = AttentionSpec(
        **sizes | fields,
        mask_shape=None if mask is None else mask.shape,
        bias_shape=None if bias is None else bias.shape,
        alibi_shape=None if slopes is None else slopes.shape,
        sinks=sinks is not None,
    )
    return spec, Inputs(q, k, v, mask, bias, slopes, sinks, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def attended(q: Any, k: Any, v: Any, **call: Any) -> Any:
    """The reference's output of a call, ``[batch, q_len, heads, value_dim]``."""
    return reference.forward(*reference_call(q, k, v, **call))[0]
