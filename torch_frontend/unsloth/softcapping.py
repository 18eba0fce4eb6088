"""Unsloth's softcapped attention for Gemma 2, on a fused kernel instead of a dense score matrix.

Names, arguments and the fields read from the layer are Unsloth's (``unsloth/kernels/flex_attention.py``, Apache-2.0):
``self.config.query_pre_attn_scalar`` and ``self.config.attn_logit_softcapping``. The formula is

    softmax(cap * tanh(Q K^T * scalar ** -0.5 / cap) + mask) V

Queries are the last positions of the keys, so decoding and prompt chunks give the same result as one whole call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from attn_core.backends.shared.autograd import without_gradient
from attn_core.call.kinds import check_size
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
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
"""Whether the two create_ functions below can be called; in the host they are None if its flag is False."""


@dataclass(frozen=True)
class PositionMask:
    """A causal mask by positions alone, for sequences of up to ``max_seq_length``; it has no tensor.

    ``window`` is the number of keys that a query sees, itself included; None: all keys before it.
    """

    max_seq_length: int
    window: int | None = None


def create_flex_attention_causal_mask(max_seq_length: int = 8192) -> PositionMask:
    """Returns a mask in which each query sees the keys up to its own position."""
    check_size("max_seq_length", max_seq_length, 1)
    return PositionMask(max_seq_length)


def create_flex_attention_sliding_window_mask(max_seq_length: int = 8192, sliding_window: int = 4096) -> PositionMask:
    """Returns a mask in which each query sees ``sliding_window`` keys, its own included; the host's shows one more."""
    check_size("max_seq_length", max_seq_length, 1)
    check_size("sliding_window", sliding_window, 1)
    return PositionMask(max_seq_length, sliding_window)


def slow_attention_softcapping(
    Q: Tensor, K: Tensor, V: Tensor, causal_mask: PositionMask | Tensor, self: Any, bsz: int, q_len: int
) -> Tensor:
    """Computes a layer's softcapped attention; differentiable.

    Args:
        Q: ``[bsz, n_heads, q_len, head_dim]``.
        K, V: ``[bsz, n_kv_heads, kv_len, head_dim]`` with ``kv_len >= q_len``.
        causal_mask: a result of the two functions above, or a float tensor added after the softcap: ``[n, n]`` by
            positions with ``n >= kv_len``, or ``[q_len, kv_len]``, or ``[.., .., q_len, kv_len]``, whose further rows
            and columns do not count; 0 is visible, -inf is hidden.
        self: the layer; its ``config`` has ``query_pre_attn_scalar`` and ``attn_logit_softcapping``.
        q_len: the number of queries, or of keys: the host's Gemma 2 passes the latter.

    Returns:
        ``[bsz, q_len, n_heads * head_dim]`` in Q's dtype, or autocast's dtype under ``torch.autocast``; 0 for queries
        that see no key.

    Raises:
        ShapeError, DTypeError, SpecError: for invalid arguments, before any kernel runs.
    """
    for name, size in (("bsz", bsz), ("q_len", q_len)):
        check_size(name, size, 0)
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(f"{name}: expected [bsz, heads, length, head_dim], got {list(tensor.shape)}")
    if Q.shape[0] != bsz or q_len not in (Q.shape[2], K.shape[2]):
        raise ShapeError(
            f"Q: expected bsz={bsz} and a length of {q_len} in [bsz, n_heads, length, ..] of Q or K, got Q "
            f"{list(Q.shape)} and K {list(K.shape)}"
        )
    out = attention(
        Q.transpose(1, 2),  # [bsz, length, heads, head_dim]
        K.transpose(1, 2),
        V.transpose(1, 2),
        softcap=_config_number(self, "attn_logit_softcapping"),
        scale=_config_number(self, "query_pre_attn_scalar") ** -0.5,
        trains=bool(getattr(self, "training", False)),
        **_mask_arguments(causal_mask, Q.shape[2], K.shape[2]),
    )
    return out.flatten(2)  # [bsz, q_len, n_heads * head_dim]


def _also_by_q_len(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Lets callers name ``kv_len`` as older versions of the host do, ``q_len``."""

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Tensor:
        if "q_len" in keywords and "kv_len" not in keywords:
            keywords["kv_len"] = keywords.pop("q_len")
        return function(*arguments, **keywords)

    return call


@_also_by_q_len
@without_gradient
def slow_inference_attention_softcapping(
    Q: Tensor, K: Tensor, V: Tensor, causal_mask: PositionMask | Tensor, self: Any, bsz: int, kv_len: int
) -> Tensor:
    """Computes ``slow_attention_softcapping`` without gradients; ``kv_len`` is its ``q_len``, and may be named so."""
    return slow_attention_softcapping(Q, K, V, causal_mask, self, bsz, kv_len)


def _config_number(layer: object, name: str) -> float:
    value = getattr(getattr(layer, "config", None), name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise SpecError(f"self.config.{name}: expected a positive number, got {shown(value)}")
    return float(value)


def _mask_arguments(mask: object, q_len: int, kv_len: int) -> dict[str, Any]:
    """Converts the host's mask to arguments of ``attention``."""
    if isinstance(mask, PositionMask):
        if kv_len > mask.max_seq_length:
            raise ShapeError(
                f"causal_mask: expected at most {mask.max_seq_length} keys (its max_seq_length), got {kv_len}"
            )
        return {"causal": True, "window": mask.window}
    if not isinstance(mask, Tensor):
        raise SpecError(
            f"causal_mask: expected a float tensor or a mask of create_flex_attention_causal_mask(), got {shown(mask)}"
        )
    check_tensor("causal_mask", mask)
    if not mask.is_floating_point():
        raise DTypeError(f"causal_mask: expected a float mask to be added (0 or -inf), got {mask.dtype}")
    if mask.ndim == 4:  # made for this call's queries, and possibly for more keys
        if mask.shape[2] < q_len or mask.shape[3] < kv_len:
            raise ShapeError(f"causal_mask: expected [.., .., {q_len}, {kv_len}] or longer, got {list(mask.shape)}")
        return {"bias": mask[..., :q_len, :kv_len]}
    if mask.ndim != 2:
        raise ShapeError(
            f"causal_mask: expected two axes, [queries, keys], or four, [bsz, heads, queries, keys], got "
            f"{list(mask.shape)}"
        )
    if tuple(mask.shape) != (q_len, kv_len):
        if min(mask.shape) < kv_len:
            raise ShapeError(
                f"causal_mask: expected [n, n] with n >= kv_len = {kv_len}, or [{q_len}, {kv_len}], got "
                f"{list(mask.shape)}"
            )
        mask = mask[kv_len - q_len : kv_len, :kv_len]  # the queries' positions are the last
    return {"bias": mask[None, None]}
