"""Registers the FLOPs of attention's ops with ``torch.utils.flop_counter``.

The count is that of torch's own attention, so that a model's total does not change: every query times every key of its
row or document, including pairs that causal, windows and masks hide. Paged sequences count the keys that they contain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import forward_mode, max_logit
from torch_frontend.dispatch import ops as dense_ops
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.op_arguments import Op, OpOptions, from_call
from torch_frontend.paged import attention  # noqa: F401  registers its op

Tensor = torch.Tensor


def _pairs(inputs: Inputs, how: OpOptions) -> int:
    """Returns the number of (query, key) pairs of one head."""
    q_len, kv_len = inputs.q.shape[-3], inputs.k.shape[-3]
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return inputs.q.shape[0] * q_len * kv_len
    longest = how.options.max_len_q, how.options.max_len_k
    queries = _lengths(inputs.cu_seqlens_q, q_len if longest[0] is None else longest[0])
    keys = _lengths(inputs.cu_seqlens_k, kv_len if longest[1] is None else longest[1])
    return sum(one * other for one, other in zip(queries, keys, strict=True))


def _lengths(offsets: Tensor, longest: int) -> list[int]:
    """Returns the lengths of documents; if the offsets have no data (fake tensors), each has the longest length."""
    return offsets.diff().tolist() if _has_values(offsets) else [longest] * (offsets.shape[0] - 1)


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _work(inputs: Inputs, how: OpOptions, of_q: int, of_v: int) -> int:
    """Returns the operations of so many matrix products as wide as q, and of so many as wide as v."""
    return 2 * inputs.q.shape[-2] * _pairs(inputs, how) * (of_q * inputs.q.shape[-1] + of_v * inputs.v.shape[-1])


def _products(op: Op, of_q: int, of_v: int) -> Callable[..., int]:
    """Returns the formula of an op with so many products."""
    return lambda *arguments, out_val=None, **_: _work(*from_call(op.call_of(arguments)), of_q, of_v)


def _jvp(*arguments: Any, out_val: object = None, **_: object) -> int:
    """Counts the forward's two matrix products, and one for each product with a tangent."""
    dq, dk, dv = (each is not None for each in arguments[:3])
    inputs, how = from_call(forward_mode.JVP.call_of(arguments))
    keys, values = 1 + dq + dk, 1 + (dq or dk) + dv
    return _work(inputs, how, keys, values)


def _paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    offsets: Tensor | None = None,
    *_: object,
    **__: object,
) -> int:
    """Counts the two products of ``attn::paged_forward``; of a call without values, those of full tables."""
    # Without values, every sequence counts as full: as many keys as its row of the table can hold.
    capacity = table.shape[1] * k.shape[1]
    pairs = q.shape[0] * capacity
    if _has_values(lengths):
        queries = [1] * len(lengths) if offsets is None else offsets.diff().tolist()
        pairs = sum(one * other for one, other in zip(queries, lengths.tolist(), strict=True))
    value_dim = v.shape[3] * (2 if v.dtype == torch.uint8 else 1)  # two int4 numbers a byte
    return 2 * q.shape[1] * pairs * (q.shape[2] + value_dim)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula

    formulas = {
        torch.ops.attn.forward: _products(dense_ops.FORWARD, 1, 1),  # queries and keys; weights and values
        # The scores again, the gradients of queries and keys; of weights and of values.
        torch.ops.attn.backward: _products(dense_ops.BACKWARD, 3, 2),
        torch.ops.attn.jvp: _jvp,
        torch.ops.attn.max_logit: _products(max_logit.MAX_LOGIT, 1, 0),
        torch.ops.attn.paged_forward: _paged,
    }
    for target, formula in formulas.items():
        register_flop_formula(target, get_raw=True)(formula)


after_import("torch.utils.flop_counter", _register)  # the counter takes half a second to import, and few use it
