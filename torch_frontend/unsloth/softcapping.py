"""Unsloth's softcapped attention for Gemma 2, on a fused kernel instead of a matrix of queries and keys.

Names, arguments and the fields read from the layer are Unsloth's (``unsloth/kernels/flex_attention.py``, Apache-2.0):
``self.config.query_pre_attn_scalar`` and ``self.config.attn_logit_softcapping``. The formula is

    softmax(cap * tanh(Q K^T * scalar ** -0.5 / cap) + mask) V

Queries stand at the end of the keys, so decoding and chunks of a prompt have the same meaning as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attn_core.call.seq_info import is_host_int
from attn_core.errors import DTypeError, ShapeError, SpecError
from torch_frontend.dispatch.plan import check_tensor
from torch_frontend.recomputed import attention_of_layer as attention

__all__ = [
    "HAS_FLEX_ATTENTION",
    "PositionMask",
    "create_flex_attention_causal_mask",
    "create_flex_attention_sliding_window_mask",
    "slow_attention_softcapping",
    "slow_inference_attention_softcapping",
]

Tensor = torch.Tensor

HAS_FLEX_ATTENTION = True
"""Whether the two functions that make masks can be called; in the host they are None while its own flag is False."""


@dataclass(frozen=True)
class PositionMask:
    """A causal mask by positions alone, for sequences of up to ``max_seq_length``; nothing is materialised.

    window: how many keys a query sees, itself included; None for all before it.
    """

    max_seq_length: int
    window: int | None = None


def create_flex_attention_causal_mask(max_seq_length: int = 8192) -> PositionMask:
    """Each query sees the keys up to its own position."""
    return PositionMask(_positive("max_seq_length", max_seq_length))


def create_flex_attention_sliding_window_mask(max_seq_length: int = 8192, sliding_window: int = 4096) -> PositionMask:
    """Each query sees ``sliding_window`` keys, its own included. (The host's function of this name let one more in.)"""
    return PositionMask(_positive("max_seq_length", max_seq_length), _positive("sliding_window", sliding_window))


def slow_attention_softcapping(
    Q: Tensor, K: Tensor, V: Tensor, causal_mask: PositionMask | Tensor, self: Any, bsz: int, q_len: int
) -> Tensor:
    """Softcapped attention of a layer; differentiable.

    Args:
        Q: ``[bsz, n_heads, q_len, head_dim]``.
        K, V: ``[bsz, n_kv_heads, kv_len, head_dim]`` with ``kv_len >= q_len``.
        causal_mask: of the two functions above, or a float tensor to be added after the softcap: ``[n, n]`` by
            positions with ``n >= kv_len``, or ``[q_len, kv_len]``; 0 visible, -inf hidden.
        self: the layer; its ``config`` has ``query_pre_attn_scalar`` and ``attn_logit_softcapping``.

    Returns:
        ``[bsz, q_len, n_heads * head_dim]`` in Q's dtype, or that of ``torch.autocast`` where it is on; 0 for queries
        that see nothing.

    Raises:
        ShapeError, DTypeError, SpecError: for what does not fit, before any kernel runs.
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(f"{name}: expected [bsz, heads, length, head_dim], got {list(tensor.shape)}")
    if (Q.shape[0], Q.shape[2]) != (bsz, q_len):
        raise ShapeError(f"Q: expected bsz={bsz} and q_len={q_len} in [bsz, n_heads, q_len, ..], got {list(Q.shape)}")
    out = attention(
        Q.transpose(1, 2),  # [bsz, length, heads, head_dim]
        K.transpose(1, 2),
        V.transpose(1, 2),
        softcap=_number(self, "attn_logit_softcapping"),
        scale=_number(self, "query_pre_attn_scalar") ** -0.5,
        trains=bool(getattr(self, "training", False)),
        **_visible(causal_mask, q_len, K.shape[2]),
    )
    return out.flatten(2)  # [bsz, q_len, n_heads * head_dim]


def slow_inference_attention_softcapping(
    Q: Tensor, K: Tensor, V: Tensor, causal_mask: PositionMask | Tensor, self: Any, bsz: int, q_len: int
) -> Tensor:
    """``slow_attention_softcapping`` without gradients."""
    with torch.no_grad():
        return slow_attention_softcapping(Q, K, V, causal_mask, self, bsz, q_len)


def _positive(name: str, value: Any) -> int:
    if not is_host_int(value) or value <= 0:
        raise SpecError(f"{name}: expected an int of 1 or more, got {value!r}")
    return int(value)


def _number(layer: Any, name: str) -> float:
    value = getattr(getattr(layer, "config", None), name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SpecError(f"self.config.{name}: expected a positive number, got {value!r}")
    return float(value)


def _visible(mask: Any, q_len: int, kv_len: int) -> dict[str, Any]:
    """The host's mask as arguments of ``attention``."""
    if isinstance(mask, PositionMask):
        if kv_len > mask.max_seq_length:
            raise ShapeError(f"causal_mask: made for {mask.max_seq_length} positions, got {kv_len} keys")
        return {"causal": True, "window": mask.window}
    if not isinstance(mask, Tensor):
        raise SpecError(
            f"causal_mask: expected a float tensor or a mask of create_flex_attention_causal_mask(), got {mask!r}"
        )
    check_tensor("causal_mask", mask)
    if not mask.is_floating_point():
        raise DTypeError(f"causal_mask: expected a float mask to be added (0 or -inf), got {mask.dtype}")
    if mask.ndim != 2:
        raise ShapeError(f"causal_mask: expected two axes, [queries, keys], got {list(mask.shape)}")
    if tuple(mask.shape) != (q_len, kv_len):
        if min(mask.shape) < kv_len:
            raise ShapeError(
                f"causal_mask: expected [n, n] with n >= kv_len = {kv_len}, or [{q_len}, {kv_len}], got "
                f"{list(mask.shape)}"
            )
        mask = mask[kv_len - q_len : kv_len, :kv_len]  # the queries' positions are the last
    return {"bias": mask[None, None]}
