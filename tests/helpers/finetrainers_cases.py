"""Calls of Finetrainers' attention_dispatch by argument, with the float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from frameworks import as_numpy
from reference_calls import reference_call

from attn_core import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.correctness import accuracy, reference
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


def judged(out: Any, lse: Any, qkv: Any, **call: Any) -> accuracy.Accuracy:
    """Whether an output in the host's layout, and the log-sum-exp if there is one, are within the dtype's bounds."""
    spec, inputs = reference_of(qkv, **call, dtype=str(out.dtype).removeprefix("torch."))
    own = as_numpy(out).swapaxes(1, 2)  # [batch, q_len, heads, value_dim]
    return accuracy.expect(spec, inputs).judge(out=own, lse=None if lse is None else as_numpy(lse))


# left padding and a hole; right padding and a hole
KEEP = np.array([[0, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 0]], bool)
RANDOM = np.random.default_rng(1)
TABLE = RANDOM.random((BATCH, HEADS, Q_LEN, KV_LEN)) < 0.7
ADDED = RANDOM.normal(size=(BATCH, 1, Q_LEN, KV_LEN)).astype(np.float32)
SLOPES = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)
KEEP4 = KEEP[:, None, None, :]


ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # name: (arguments, fields of the spec, how a refusal names them)
    "plain": ({}, {}, ""),
    "scale": ({"scale": 0.7}, {"scale": 0.7}, ""),
    "scale below 0": ({"scale": -0.7}, {"scale": -0.7}, ""),
    "is_causal": ({"is_causal": True}, {"causal": True}, ""),
    "keys": ({"attn_mask": KEEP4}, {"mask": KEEP4}, "mask"),
    "keys and causal": ({"attn_mask": KEEP4, "is_causal": True}, {"mask": KEEP4, "causal": True}, "mask"),
    "table": ({"attn_mask": TABLE}, {"mask": TABLE}, "mask"),
    "table and causal": ({"attn_mask": TABLE, "is_causal": True}, {"mask": TABLE, "causal": True}, "mask"),
    "added": ({"attn_mask": ADDED}, {"bias": ADDED}, "bias|attn_mask"),
    "window": ({"window_size": (2, 1)}, {"window": (2, 1), "alignment": "bottom_right"}, "window"),
    "left window": ({"window_size": [3, -1]}, {"window": (3, None), "alignment": "bottom_right"}, "window"),
    "no window": ({"window_size": (-1, -1)}, {}, ""),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}, "softcap=1.5"),
    "no softcap": ({"softcap": 0.0}, {}, ""),
    "slopes": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES, "alignment": "bottom_right"}, "alibi_slopes"),
    "deterministic": ({"deterministic": True}, {}, "deterministic"),
    "return_lse": ({"return_lse": True}, {}, "return_lse"),
    "dropout": ({"dropout_p": 1e-9}, {}, "dropout=1e-09"),
    "window and keys": (
        {"window_size": (2, 1), "attn_mask": KEEP4},
        {"mask": KEEP4, "window": (2, 1), "alignment": "bottom_right"},
        "window",
    ),
    "softcap and keys": ({"softcap": 1.5, "attn_mask": KEEP4}, {"softcap": 1.5, "mask": KEEP4}, "softcap|mask"),
    "lse and keys": ({"return_lse": True, "attn_mask": KEEP4}, {"mask": KEEP4}, "mask|return_lse"),
}

FIRST_EIGHT = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def dispatched(word: str, qkv: Any, arguments: dict[str, Any]) -> Any:
    """attention_dispatch on a provider; arrays among the arguments move to the device of the query."""

    def own(value: Any) -> Any:
        given = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        return given.to(qkv[0].device) if isinstance(given, torch.Tensor) else given

    placed = {name: own(value) for name, value in arguments.items()}
    direct = {name: value for name, value in placed.items() if name in FIRST_EIGHT}
    kwargs = {name: value for name, value in placed.items() if name not in FIRST_EIGHT}
    with attention_provider(word):
        return attention_dispatch(*qkv, **{"enable_gqa": True, **direct}, attention_kwargs=kwargs or None)


def with_scale_above_0(qkv: Any, fields: dict[str, Any]) -> Any:
    """A negative scale as the reference takes it: with a negated query."""
    return (qkv[0] * float(np.sign(fields.get("scale", 1))), *qkv[1:])
