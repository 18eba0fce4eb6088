"""Tensors for Finetrainers' attention_dispatch, its calls, and their results by the float64 reference."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from frameworks import as_numpy
from reference_calls import reference_call

from attn_core import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.correctness import reference
from torch_frontend.finetrainers import attention_dispatch, attention_provider

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, HEAD_DIM = 2, 6, 3, 5, 7, 11


def tensors(
    q_len: int = Q_LEN,
    kv_len: int = KV_LEN,
    value_dim: int = HEAD_DIM,
    batch: int = BATCH,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """query, key and value in the host's layout, ``[batch, heads, len, head_dim]``; the same numbers on every
    device."""
    random = torch.Generator().manual_seed(0)
    shapes = ((HEADS, q_len, HEAD_DIM), (KV_HEADS, kv_len, HEAD_DIM), (KV_HEADS, kv_len, value_dim))
    return tuple(torch.randn(batch, *shape, generator=random).to(device, dtype) for shape in shapes)


def reference_of(qkv: Any, **call: Any) -> tuple[AttentionSpec, Inputs]:
    """The reference's call of tensors in the host's layout, aligned at the first key unless ``call`` says otherwise."""
    rows = (as_numpy(tensor).swapaxes(1, 2) for tensor in qkv)  # [batch, len, heads, head_dim]
    return reference_call(*rows, **{"alignment": "top_left", **call})


def expected(qkv: Any, **call: Any) -> Any:
    """The reference's (output, log-sum-exp) in the host's layout."""
    out, lse = reference.forward(*reference_of(qkv, **call))
    return out.swapaxes(1, 2), lse


def close(actual: Any, right: Any) -> None:
    np.testing.assert_allclose(as_numpy(actual), right, atol=2e-5, rtol=0)


# left padding and a hole; right padding and a hole
KEEP = np.array([[0, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 0]], bool)
KEEP4 = KEEP[:, None, None, :]
ADDED = np.random.default_rng(1).normal(size=(BATCH, 1, Q_LEN, KV_LEN)).astype(np.float32)

FIRST_EIGHT = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def dispatched(word: str | None, qkv: Any, arguments: dict[str, Any]) -> Any:
    """attention_dispatch on a provider, or outside of all blocks; arrays among the arguments move to the device of the
    query."""

    def own(value: Any) -> Any:
        given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return given.to(qkv[0].device) if isinstance(given, torch.Tensor) else given

    placed = {name: own(value) for name, value in arguments.items()}
    direct = {name: value for name, value in placed.items() if name in FIRST_EIGHT}
    kwargs = {name: value for name, value in placed.items() if name not in FIRST_EIGHT}
    with nullcontext() if word is None else attention_provider(word):
        return attention_dispatch(*qkv, **{"enable_gqa": True, **direct}, attention_kwargs=kwargs or None)
