"""How much arithmetic the ops of attention are, for ``torch.utils.flop_counter``.

Counted as torch counts its own attention, so that a model's sum stays what it was: every query meets every key of its
row or document, whatever causal, windows and masks hide. Sequences in pages meet the keys that they hold.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from attn_core.call.tensors import Inputs
from torch_frontend.dispatch.ops import PlainOptions, from_call
from torch_frontend.paged import ops  # noqa: F401  registers its op

Tensor = torch.Tensor


def _pairs(inputs: Inputs, plain: PlainOptions) -> Any:
    """(query, key) pairs of one head."""
    q_len, kv_len = inputs.q.shape[-3], inputs.k.shape[-3]
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return inputs.q.shape[0] * q_len * kv_len
    queries = _lengths(inputs.cu_seqlens_q, q_len if plain.max_len_q is None else plain.max_len_q)
    keys = _lengths(inputs.cu_seqlens_k, kv_len if plain.max_len_k is None else plain.max_len_k)
    return sum(one * other for one, other in zip(queries, keys, strict=True))


def _lengths(offsets: Tensor, longest: Any) -> list[Any]:
    """The lengths of documents; all are the longest where the offsets have no values."""
    return offsets.diff().tolist() if _has_values(offsets) else [longest] * (offsets.shape[0] - 1)


def _has_values(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and not tensor.is_meta


def _forward(*call: Any, out_val: Any = None, **_: Any) -> Any:
    """Two matrix products: queries and keys, weights and values."""
    inputs, plain = from_call(call)
    return 2 * inputs.q.shape[-2] * _pairs(inputs, plain) * (inputs.q.shape[-1] + inputs.v.shape[-1])


def _backward(*arguments: Any, out_val: Any = None, **_: Any) -> Any:
    """Five: the scores again, the gradients of weights and values, and those of queries and keys."""
    inputs, plain = from_call(arguments[5:])
    return 2 * inputs.q.shape[-2] * _pairs(inputs, plain) * (3 * inputs.q.shape[-1] + 2 * inputs.v.shape[-1])


def _paged(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    capacity = table.shape[1] * k.shape[1]
    pairs = q.shape[0] * capacity
    if _has_values(lengths):
        queries = [1] * len(lengths) if offsets is None else offsets.diff().tolist()
        pairs = sum(one * other for one, other in zip(queries, lengths.tolist(), strict=True))
    return 2 * q.shape[1] * pairs * (q.shape[2] + v.shape[3])


for _target, _formula in (
    (torch.ops.attn.forward, _forward),
    (torch.ops.attn.backward, _backward),
    (torch.ops.attn.paged_forward, _paged),
):
    register_flop_formula(_target, get_raw=True)(_formula)
