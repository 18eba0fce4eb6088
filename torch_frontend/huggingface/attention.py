"""transformers' attention interface: honours every keyword, or raises an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_core.call.layers import refuse_over_ranks
from attn_core.errors import ShapeError, SpecError
from torch_frontend.context_parallel.layers import ActiveMesh, active_block
from torch_frontend.huggingface import context as huggingface_context
from torch_frontend.huggingface.continuous_batching import attend_to_cache, take_keywords, window_of
from torch_frontend.huggingface.described_mask import DescribedMask, Mask, description_of
from torch_frontend.huggingface.layer_call import (
    LayerCall,
    documents_from_offsets,
    of_prompt,
    prepare,
    read_table,
    share,
    split_mask,
)
from torch_frontend.recomputed import attention_of_heads as attention

Tensor = torch.Tensor
_is_compiling = torch.compiler.is_compiling

LAYER_BACKEND = "attn_core_backend"
"""The attribute of an attention module that names the backend of its layer."""

_IGNORED = (
    "cache_position",
    "seq_idx",  # the mask or the documents' offsets have the same information
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "logits_to_keep",
    "num_items_in_batch",
    "ignore_index",
    "shift_labels",
    "label_smoothing",
    "reduction",  # of a model's loss
)
"""Keywords that models pass to every layer and that do not affect attention."""


def attend(  # noqa: C901
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    position_ids: Tensor | None = None,
    deterministic: bool | None = None,
    *,
    backend: str | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes a layer's attention.

    Args:
        query: ``[batch, heads, q_len, head_dim]``; key, value: ``[batch, kv_heads, kv_len, ...]``.
        s_aux: sinks ``[heads]``; sinks: one for each query, ``[batch, heads, q_len, 1]``.
        indices: the keys that a model selects for each query, as in ``selected_keys``.
        block_indices: the blocks of keys that it selects for each query, as in ``mask_of_blocks``.

    Returns:
        ``([batch, q_len, heads, value_dim], None)``; None because fused kernels have no attention weights to return.

    Raises:
        SpecError and its subclasses: for an unsupported argument, and for contradictions.
        NoBackendError: if no backend, or not the requested one, can run the call.
    """
    compiling = _is_compiling()
    if compiling:
        chosen = getattr(module, LAYER_BACKEND, None)
    else:  # not by the module's own lookup, which takes microseconds for a missing attribute
        chosen = module.__dict__.get(LAYER_BACKEND) or getattr(type(module), LAYER_BACKEND, None)
    options: dict[str, Any] = {
        "softcap": softcap,
        "scale": scaling,
        "sinks": s_aux,
        "dropout": dropout,
        "deterministic": bool(deterministic),
        "backend": chosen or backend,
        "invariant": getattr(getattr(module, "config", None), INVARIANT, None),
    }
    if others:
        cache = others.pop("cache", None)
        if cache is not None or others.get("write_index") is not None:  # from 5.24 on the model updates the cache
            refused = {
                "position_bias": position_bias,
                "indices": indices,
                "block_indices": block_indices,
                "sinks": sinks,
            }
            own: dict[str, Any] = {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            own |= {"max_length_q": max_length_q, "max_length_k": max_length_k, **take_keywords(others)}
            check_keywords({**others, **refused})
            window = window_of(attention_mask, sliding_window, is_causal)
            return attend_to_cache(module, query, key, value, cache, window, own, options)
        check_keywords(others)
    if block_indices is not None:
        attention_mask = mask_of_blocks(module, block_indices, attention_mask, query, key, position_ids)
    call, described = None, None
    alone = position_bias is None and cu_seq_lens_q is None and cu_seq_lens_k is None
    # All layers of a model read one mask: the first layer prepares the call, and the others look it up.
    if alone and not compiling and active_block() is None:
        described = attention_mask if type(attention_mask) is DescribedMask else description_of(attention_mask)
        if described is not None:
            call = described.shared.get((query.shape[2], key.shape[2], sliding_window))
            if call is not None and call.positions is not None and call.positions() is not position_ids:
                call = None  # its documents were read from other positions
        elif type(attention_mask) is Tensor and attention_mask.dtype is torch.bool:
            call = read_table(module, attention_mask, query.shape[2], key.shape[2])
    if call is None:
        context = huggingface_context.context_of(module, attention_mask)
        if context is not None:  # in a block of context parallelism, where rows are spread over ranks
            tables = {"attention_mask": attention_mask, "position_bias": position_bias}
            tables |= {"cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
            tables |= {"indices": indices, "sinks": sinks}
            bands = is_causal, sliding_window
            return attend_in_context(module, context, (query, key, value), tables, bands, options)
        lengths = query.shape[0], query.shape[2], key.shape[2]
        call = prepare(
            module,
            attention_mask if described is None else described,
            lengths,
            is_causal=is_causal,
            sliding_window=sliding_window,
            bias=position_bias,
            info=documents_from_offsets(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k),
            position_ids=position_ids,
            has_promise=options["invariant"] is not None,
        )
        if described is not None:
            share(call, described, lengths, sliding_window, position_ids)
    if indices is not None:
        call = with_selected(call, selected_keys(indices, query, key), query.shape[0])
    if options["invariant"] == "prefix" and query.shape[2] == 1:
        call = of_prompt(call)
    if call.seen is not None:  # the rest of a static cache is empty
        key, value = key[:, :, : call.seen], value[:, :, : call.seen]
    results: Any = attention(
        query,
        key,
        value,
        causal=call.causal,
        window=call.window,
        alignment=call.alignment,
        mask=call.mask,
        key_ranges=call.key_ranges,
        bias=call.bias,
        seq_info=call.seq_info,
        trains=bool(getattr(module, "training", False)),
        return_lse=sinks is not None,
        **options,
    )
    out: Tensor = results if sinks is None else absorb(results[0], results[1], sinks)
    return out.contiguous(), None


INVARIANT = "attn_core_invariant"
"""The attribute of a model's config that says ``invariant`` of ``attention`` for its layers."""


def attend_in_context(
    module: torch.nn.Module,
    context: ActiveMesh,
    operands: tuple[Tensor, Tensor, Tensor],
    tables: dict[str, Any],
    bands: tuple[bool | None, int | None],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Computes a layer's attention under ``use_context_parallel``; arguments and results as in ``attend``.

    Args:
        context: the block's arguments.
        tables: arguments that must be None or a described mask.
        bands: (is_causal, sliding_window).
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in operands)  # [batch, len, heads, head_dim]
    context.tell(huggingface_context.check_arguments, tables, q, k)
    context.tell(refuse_over_ranks, {}, options.pop("invariant", None))
    visible, _, _ = split_mask(tables["attention_mask"], module, *bands, (q.shape[1], k.shape[1]))
    causal = visible.right == 0
    window = visible.left, None if causal else visible.right
    return context.attend(q, k, v, causal=causal, window=window, **options).contiguous(), None


def check_keywords(others: Mapping[str, object]) -> None:
    """Raises SpecError for a keyword with a value that attention does not support."""
    for name, value in others.items():
        if value is None or value is False or name in _IGNORED:
            continue
        remedy = {
            "output_attentions": "fused kernels never hold the weights; load with attn_implementation='eager' for them",
        }.get(name, "this attention has no such option")
        shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise SpecError(f"{name}={shown}: {remedy}" if len(shown) < 80 else f"{name}: {remedy}")


def selected_keys(indices: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Returns the keys that a model selected for all heads, bool ``[batch, 1, q_len, kv_len]``.

    Args:
        indices: ints ``[batch, q_len, count]``; a negative one selects nothing.
        query, key: ``[batch, heads, len, head_dim]``.

    Raises:
        ShapeError: if the indices have other axes.
    """
    (batch, _, queries, _), keys = query.shape, key.shape[2]
    if indices.dim() != 3 or tuple(indices.shape[:2]) != (batch, queries):
        raise ShapeError(f"indices: expected [{batch}, {queries}, count], got {list(indices.shape)}")
    # A negative index marks one more place, which the slice drops.
    places = torch.where(indices < 0, keys, indices).long()
    marks = torch.zeros((batch, queries, keys + 1), dtype=torch.bool, device=indices.device)
    return marks.scatter(-1, places, True)[:, None, :, :keys]


def mask_of_blocks(
    module: torch.nn.Module,
    block_indices: Tensor,
    attention_mask: Mask,
    query: Tensor,
    key: Tensor,
    position_ids: Tensor | None,
) -> Tensor:
    """Returns the mask that a layer's own indexer builds from selected blocks, as for ``sdpa``: 0, or the lowest float.

    Args:
        block_indices: ints ``[batch, index_heads, q_len, count]``.
        query, key: ``[batch, heads, len, head_dim]``.

    Raises:
        SpecError: if the layer's indexer has no ``build_block_mask``.
    """
    build = getattr(getattr(module, "indexer", None), "build_block_mask", None)
    if build is None:
        raise SpecError(
            f"block_indices: expected a layer with indexer.build_block_mask, as MiniMax M3 has, got "
            f"{type(module).__name__}; load the model with attn_implementation='eager'"
        )
    if position_ids is None:
        position_ids = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
    if position_ids.dim() == 1:
        position_ids = position_ids[None]
    dense = attention_mask.build() if isinstance(attention_mask, DescribedMask) else attention_mask
    result: Tensor = build(
        block_indices, dense, key.shape[2], query.dtype, query.device, position_ids.expand(query.shape[0], -1)
    )
    return result


def with_selected(call: LayerCall, selected: Tensor, batch: int) -> LayerCall:
    """Returns a call that sees only the selected keys among its visible keys.

    Args:
        selected: bool ``[batch, 1, q_len, kv_len]``.
    """
    if call.seq_info is not None and batch > 1:
        selected = _end_to_end(selected)
    if call.seen is not None:
        selected = selected[..., : call.seen]
    return call._replace(mask=selected if call.mask is None else selected & call.mask)


def absorb(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns attention whose softmax has one more logit per query, which has no value.

    That logit scales a row by ``exp(lse) / (exp(lse) + exp(sink))``.

    Args:
        out: attention without sinks, ``[batch, q_len, heads, value_dim]``.
        lse: its log-sum-exp, ``[batch, heads, q_len]``.
        sinks: ``[batch, heads, q_len, 1]``.

    Raises:
        ShapeError: for sinks of another shape.
    """
    if sinks.shape != (*lse.shape, 1):
        raise ShapeError(f"sinks: expected one for each query, {[*lse.shape, 1]}, got {list(sinks.shape)}")
    share = torch.sigmoid(lse - sinks[..., 0].to(lse.dtype))  # [batch, heads, q_len]
    return (out * share.transpose(1, 2)[..., None]).to(out.dtype)


def _end_to_end(selected: Tensor) -> Tensor:
    """Returns the table ``[1, 1, batch * q_len, batch * kv_len]`` of rows that are laid end to end."""
    batch, _, queries, keys = selected.shape
    own = torch.eye(batch, dtype=torch.bool, device=selected.device)[:, None, :, None]  # [batch, 1, batch, 1]
    return (selected.transpose(1, 2) & own).reshape(1, 1, batch * queries, batch * keys)
