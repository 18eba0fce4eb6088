"""transformers' attention interface: honours every keyword, or raises an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from attn_core.errors import DTypeError, ShapeError, SpecError
from torch_frontend.dispatch.plan import check_tensor, smaller
from torch_frontend.huggingface import context as huggingface_context
from torch_frontend.huggingface.described_mask import DescribedMask, VisibleKeys
from torch_frontend.huggingface.documents import documents_from_offsets, documents_from_positions
from torch_frontend.recomputed import attention_of_layer as attention

Tensor = torch.Tensor

LAYER_BACKEND = "attn_core_backend"
"""The attribute of an attention module that names the backend of its layer."""

_IGNORED = (
    *("cache_position", "seq_idx"),  # the mask or the documents' offsets have the same information
    *("use_cache", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
    *("num_items_in_batch", "ignore_index", "shift_labels", "label_smoothing", "reduction"),  # of a model's loss
)
"""Keywords that models pass to every layer and that do not affect attention."""


class Operands(NamedTuple):
    """q, k, v ``[batch, len, heads, head_dim]``; mask and bias broadcast to ``[batch, heads, q_len, kv_len]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    bias: Tensor | None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    position_ids: Tensor | None = None,
    deterministic: bool | None = None,
    *,
    backend: str | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; key, value: ``[batch, kv_heads, kv_len, ...]``.

    Returns:
        ``([batch, q_len, heads, value_dim], None)``; None because fused kernels have no attention weights to return.

    Raises:
        SpecError and its subclasses: for an unsupported argument, and for contradictions.
        NoBackendError: if no backend, or not the requested one, can run the call.
    """
    check_keywords(others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [batch, len, heads, head_dim]
    context = huggingface_context.context_of(module, attention_mask)
    if context is not None:
        tables = {"attention_mask": attention_mask, "position_bias": position_bias, "cu_seq_lens_q": cu_seq_lens_q}
        huggingface_context.check_arguments(tables | {"cu_seq_lens_k": cu_seq_lens_k}, q, k)
    visible, mask, bias = split_mask(attention_mask, module, is_causal, sliding_window, (q.shape[1], k.shape[1]))
    options: dict[str, Any] = {
        "causal": visible.right == 0,
        "window": (visible.left, None if visible.right == 0 else visible.right),
        **{"softcap": softcap, "scale": scaling, "sinks": s_aux, "dropout": dropout},
        "deterministic": bool(deterministic),
        "backend": getattr(module, LAYER_BACKEND, None) or backend,
    }
    if context is not None:
        return context.attend(q, k, v, **options).contiguous(), None
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    info = documents_from_offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k) or visible.seq_info
    if info is None and position_ids is not None:
        info = documents_from_positions(position_ids, q.shape[0], visible, attention_mask)
    operands, alignment = Operands(q, k, v, mask, bias), "bottom_right"
    if info is None:
        operands, alignment = cut_keys(operands, visible)
    else:
        operands = join_rows(operands, visible.keys)
    out = attention(
        operands.q,
        operands.k,
        operands.v,
        alignment=alignment,
        mask=operands.mask,
        bias=operands.bias,
        seq_info=info,
        trains=bool(getattr(module, "training", False)),
        **options,
    )
    if info is not None:  # [batch * len, heads, value_dim] -> [batch, len, heads, value_dim]
        out = out.reshape(q.shape[0], q.shape[1], *out.shape[-2:])
    return out.contiguous(), None


def cut_keys(operands: Operands, visible: VisibleKeys) -> tuple[Operands, str]:
    """Returns the operands without keys behind a causal call's last query, and the alignment of the remaining keys.

    Keys behind the last query are the unused rest of a static cache. Padding becomes a mask of keys.
    """
    q, k, v, mask, bias = operands
    keys, alignment = visible.keys, "bottom_right"
    seen, causal = visible.offset + q.shape[1], visible.right == 0
    first = torch.compiler.is_compiling() and causal and visible.offset == 0  # no comparison: lengths may be symbols
    if first:
        seen = smaller(seen, k.shape[1])
    if first or (causal and seen < k.shape[1]):
        k, v = k[:, :seen], v[:, :seen]
        keys, bias = (None if table is None else table[..., :seen] for table in (keys, bias))
    if first or seen != k.shape[1]:
        alignment = "top_left"  # the offset is 0, or there is no band to align
    if keys is not None:
        mask = keys[:, None, None, :]  # [batch, 1, 1, kv_len]; a described mask has no other mask
    return Operands(q, k, v, mask, bias), alignment


def join_rows(operands: Operands, keys: Tensor | None) -> Operands:
    """Lays the rows of the batch end to end, as one row of packed documents.

    Raises:
        SpecError: for several rows with a mask or a bias.
    """
    q, k, v, mask, bias = operands
    if q.shape[0] > 1 and (mask is not None or bias is not None):
        raise SpecError("attention_mask, position_bias: expected none of 4 axes with packed rows, or a single row")
    if keys is not None:
        mask = keys.reshape(1, 1, 1, -1)  # [1, 1, 1, batch * kv_len]
    q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))  # [batch * len, heads, head_dim]
    return Operands(q, k, v, mask, bias)


def check_keywords(others: Mapping[str, Any]) -> None:
    """Raises SpecError for a keyword with a value that attention does not support."""
    for name, value in others.items():
        if value is None or value is False or name in _IGNORED:
            continue
        remedy = {
            "output_attentions": "fused kernels never hold the weights; load with attn_implementation='eager' for them",
            "cache": "paged caches (continuous batching) are not supported",
        }.get(name, "this attention has no such option")
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise SpecError(f"{name}={shown}: {remedy}" if len(shown) < 80 else f"{name}: {remedy}")


def split_mask(
    attention_mask: Any, module: Any, is_causal: bool | None, sliding_window: int | None, lengths: tuple[int, int]
) -> tuple[VisibleKeys, Tensor | None, Tensor | None]:
    """Returns ``attention_mask`` as (VisibleKeys, bool mask, additive bias).

    A mask alone decides what is visible, as in ``eager`` attention. Without a mask the other arguments decide.
    """
    if isinstance(attention_mask, DescribedMask):
        visible = attention_mask.visible
        if visible.lengths != lengths:
            raise ShapeError(f"attention_mask: built for (q, kv) lengths {visible.lengths}, got {lengths}")
        check_window(visible, sliding_window)
        return visible, None, None
    if attention_mask is None:
        return without_mask(module, is_causal, sliding_window, lengths), None, None
    if not isinstance(attention_mask, Tensor):
        raise SpecError(f"attention_mask: expected a tensor of 4 axes or None, got {type(attention_mask).__name__}")
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 4:
        raise ShapeError(f"attention_mask: expected [batch, heads, q, kv], got {list(attention_mask.shape)}")
    everything = VisibleKeys(None, None, 0, lengths)
    if attention_mask.dtype == torch.bool:
        return everything, attention_mask, None
    if attention_mask.is_floating_point():
        return everything, None, attention_mask
    raise DTypeError(
        f"attention_mask: expected bool (True = visible) or a float to be added, got {attention_mask.dtype} of 4 axes"
    )


def without_mask(
    module: Any, is_causal: bool | None, sliding_window: int | None, lengths: tuple[int, int]
) -> VisibleKeys:
    """Returns what the module's ``is_causal`` (or the argument) and ``sliding_window`` make visible.

    The alignment is that of transformers' SDPA attention: the first query at the first key, a single one at the last.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if sliding_window is not None and not causal:
        raise SpecError(f"sliding_window={sliding_window}: expected a mask or causal attention")
    # The window counts the query's own key, left only the keys before it.
    left = None if sliding_window is None else sliding_window - 1
    return VisibleKeys(left, 0 if causal else None, lengths[1] - 1 if lengths[0] == 1 else 0, lengths)


def check_window(visible: VisibleKeys, sliding_window: int | None) -> None:
    """Raises SpecError if a causal mask and the layer's ``sliding_window`` contradict each other."""
    whole = visible.context is None  # a window wider than a shard may still hide keys of the row
    # A window that is at least as long as the row hides nothing, so the mask need not have it.
    if sliding_window is None or visible.right != 0 or (whole and sliding_window >= visible.lengths[1]):
        return
    if visible.left != sliding_window - 1:
        shown = "no window" if visible.left is None else f"a window of {visible.left + 1} keys"
        raise SpecError(f"sliding_window={sliding_window}: the model's mask has {shown}; they must agree")
