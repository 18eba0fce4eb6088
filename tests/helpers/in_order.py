"""Small tiles and shares for the kernels that add in one order, in Triton's interpreter, and calls of both kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import Order, Tiles
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs

SMALL = Order(16, 32, (Tiles(16, 16, 1, 2), Tiles(32, 16, 2, 2)))
"""So that few keys are several tiles and shares."""
ALL, NONE = 10**9, 0
"""FEW_PROGRAMS with which each share has a program of its own, or no share."""


def product(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
    """A product whose rows are independent of each other, as a GPU's are; those of numpy's library need not be."""
    from triton.runtime.interpreter import TensorHandle

    rows, columns = (_float32(each) for each in (a, b))
    total = np.zeros_like(sums.data)  # so that a sum depends on the tiles, as a GPU's does
    for at in range(rows.shape[1]):
        total += rows[:, at : at + 1] * columns[at]
    return TensorHandle(sums.data + total, sums.dtype.scalar)


def _float32(handle: Any) -> np.ndarray:
    import triton.language as tl

    if handle.dtype.scalar == tl.bfloat16:  # the interpreter keeps its bits as integers
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def make_small(patch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Small tiles and shares, and products as a GPU has them."""
    from triton.runtime.interpreter import InterpreterBuilder

    patch.setattr(InterpreterBuilder, "create_dot", product)
    patch.setattr(order, "NARROW", SMALL)
    return patch


def packed_of(spec: AttentionSpec, inputs: PagedInputs) -> tuple[AttentionSpec, Inputs]:
    """Returns a call on pages as one of packed documents, with the keys that its sequences see; arrays of numpy."""
    from dataclasses import replace

    sequences = range(len(inputs.seq_lens))
    starts = np.zeros(len(sequences), int) if inputs.kv_starts is None else inputs.kv_starts
    packed = []
    for pool in (inputs.k, inputs.v):
        rows = [pool[inputs.block_table[at]].reshape(-1, *pool.shape[2:]) for at in sequences]
        packed.append(np.concatenate([rows[at][starts[at] : inputs.seq_lens[at]] for at in sequences]))
    ends = np.cumsum([0, *(inputs.seq_lens - starts)]).astype(np.int32)
    cu = np.arange(len(sequences) + 1, dtype=np.int32) if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    longest = {"max_len_q": spec.max_len_q, "max_len_k": max(int(np.diff(ends).max()), 1)}
    spec = replace(spec, paged=None, kv_len=int(ends[-1]), **longest)
    others = {"sinks": inputs.sinks, "alibi_slopes": inputs.alibi_slopes}
    return spec, Inputs(inputs.q, *packed, cu_seqlens_q=cu, cu_seqlens_k=ends, **others)
