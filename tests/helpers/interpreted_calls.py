"""Calls for our Triton kernels of attention in Triton's interpreter: few tokens, in every band and as documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from spec_strategies import Call

from attn_core.call.tensors import Inputs

SIZES: dict[str, Any] = {
    **{"batch": 2, "q_len": 37, "kv_len": 83, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16},
    "dtype": "float16",
}
DOCUMENTS = {**SIZES, "batch": 1, "lengths": ((33, 0, 67, 5), (20, 8, 90, 0))}
BANDS: dict[str, dict[str, Any]] = {
    "plain": SIZES,
    "bfloat16": {**SIZES, "dtype": "bfloat16", "causal": True},
    "causal": {**SIZES, "causal": True, "num_kv_heads": 2},
    "top left": {**SIZES, "causal": True, "alignment": "top_left"},
    "rows without keys": {**SIZES, "causal": True, "q_len": 83, "kv_len": 37},
    "window": {**SIZES, "window": (17, 5), "kv_len": 150},
    "a narrow window": {**SIZES, "window": (3, 0), "q_len": 130, "kv_len": 130, "batch": 1},
    "a window on the left": {**SIZES, "window": (40, None)},
    "a window on the right": {**SIZES, "window": (None, 3)},
    "a window beside the keys": {**SIZES, "window": (2, 1), "alignment": "top_left", "q_len": 83, "kv_len": 37},
    "softcap": {**SIZES, "softcap": 1.3},
    "documents": {**DOCUMENTS, "causal": True},
    "documents, top left": {**DOCUMENTS, "causal": True, "alignment": "top_left", "dtype": "bfloat16"},
}
FLOAT32: dict[str, dict[str, Any]] = {
    "float32": {**SIZES, "dtype": "float32", "causal": True},
    "odd widths": {**SIZES, "head_dim": 21, "value_dim": 13, "dtype": "float32", "window": (40, 7)},
}
SINKS: dict[str, dict[str, Any]] = {
    "sinks": {**SIZES, "sinks": True, "causal": True},
    "rows without keys, sinks": {**BANDS["rows without keys"], "sinks": True},
    "as wide as it gets": {**SIZES, "head_dim": 256, "value_dim": 256, "batch": 1, "num_heads": 1, "kv_len": 40},
}
FAULTY = {**BANDS["window"], "scale": 1.0, "softcap": 1.5}
"""A call that a kernel may misread in every way of ``MISREAD``."""
LIES = ([0, 99, 3, 10**6, -7], [-5, 2**31 - 1, 40, 41, 2**31 - 1], [50, 40, 30, 20, 10])
"""Offsets of four documents that lead outside of the tokens."""


def tensor(array: Any, dtype: str) -> Any:
    return None if array is None else torch.from_numpy(np.array(array)).to(getattr(torch, dtype))


def tensors(call: Call) -> Inputs:
    """The inputs as the frontends pass them to a backend."""
    kinds = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "int32")
    given = {name: each for name, each in call.inputs._asdict().items() if each is not None}
    return Inputs(**{name: tensor(each, kinds.get(name) or call.dtype_of(name)) for name, each in given.items()})


def amid_nan(rows: Any) -> Any:
    """The same rows as the middle of a tensor that is NaN on both sides."""
    wide = rows.new_full((3 * len(rows), *rows.shape[1:]), torch.nan)
    wide[len(rows) : 2 * len(rows)] = rows
    return wide[len(rows) : 2 * len(rows)]


def heads_outside(each: Any) -> Any:
    """The same values, in memory with the heads before the tokens."""
    return each.transpose(1, 2).contiguous().transpose(1, 2)


def stepped(each: Any) -> Any:
    """The same values in every second place of the last axis."""
    return each.repeat_interleave(2, -1)[..., ::2]
