"""Unsloth's ``run_attention`` for torch tensors: the same result on every backend (see attn_core.dropins.unsloth)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from attn_core.call.tensors import dtype_name
from attn_core.dropins.unsloth.arguments import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    check_fields,
    check_sizes,
    choose_word,
    computed_in,
    documents,
    preference,
    trains,
)
from attn_core.dropins.unsloth.prefix import resolve_prefix_seg_info, shared_prefixes
from attn_core.dropins.unsloth.request import UnslothRequest, interpret, split_mask
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.backends import available_here
from torch_frontend.dispatch.autocast import autocast_dtype
from torch_frontend.dispatch.backend_names import FROM_CONTEXT
from torch_frontend.dispatch.plan import check_tensor, device_name
from torch_frontend.dispatch.tensor_kinds import check_data
from torch_frontend.recomputed import attention_of_layer

__all__ = [
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "HAS_FLASH_ATTENTION",
    "HAS_XFORMERS",
    "SDPA",
    "SDPA_HAS_GQA",
    "XFORMERS",
    "AttentionConfig",
    "AttentionContext",
    "decode_scaled_dot_product_attention",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
]

Tensor = torch.Tensor

SDPA_HAS_GQA = True
"""Whether torch's own attention supports grouped heads: True for every torch that this package supports."""

decode_scaled_dot_product_attention: Callable[..., Tensor]
"""Attention with the signature of torch's own function, which decoding calls; loads at first use."""
HAS_FLASH_ATTENTION: bool
"""Whether a FlashAttention package runs on this machine; looked up on access."""
HAS_XFORMERS: bool
"""Whether xformers runs on this machine; looked up on access."""


def __getattr__(name: str) -> Any:
    if name == "decode_scaled_dot_product_attention":
        from torch_frontend.finetrainers import attention_dispatch  # loads at first use, like this drop-in everywhere

        return attention_dispatch
    if name == "HAS_FLASH_ATTENTION":
        return choose_word(available_here(), use_varlen=True) == FLASH_VARLEN
    if name == "HAS_XFORMERS":
        return "xformers" in available_here()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def run_attention(*, config: AttentionConfig, context: AttentionContext, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Computes attention: ``Q [bsz, n_heads, q_len, head_dim]``, ``K, V [bsz, n_kv_heads, kv_len, head_dim]``.

    It is causal unless the config's keyword arguments, ``context.is_causal`` or a complete mask state otherwise. With
    ``context.seq_info`` the rows are laid end to end and hold packed documents; with ``context.prefix_seg_info`` they
    share prefixes.
    ``config.backend`` is a preference: automatic choice runs what that backend cannot, with the same result.

    Returns:
        ``[bsz, q_len, n_heads, head_dim]`` in Q's dtype, even if the kernel computes a float32 Q in another dtype:
        under ``torch.autocast``, and if K or V has a half dtype.

    Raises:
        SpecError and its subclasses: for contradictions, unknown keys and wrong sizes, before any kernel runs.
    """
    for name, tensor in (("Q", Q), ("K", K), ("V", V)):
        check_tensor(name, tensor)
    check_data(Q, K=K, V=V)
    check_data(K, Q=Q)
    check_fields(config, context)
    for name in ("attention_mask", "causal_mask"):  # other types are masks of the host's own classes
        if isinstance(getattr(context, name), Tensor):
            check_tensor(f"context.{name}", getattr(context, name))
    check_sizes(config, context, Q.shape, K.shape, V.shape)
    request = interpret(config, context)
    backend = _backends(preference(config, "torch", device_name(Q.device), request.options.get("invariant")))
    # Adapters such as DoRA make some of Q, K and V float32, and attention needs one dtype.
    q, k, v = (Q, K, V) if Q.dtype == K.dtype == V.dtype else _cast_to_half(Q, K, V)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [bsz, len, heads, head_dim]
    if context.prefix_seg_info is not None:
        out = _attend_prefixes(q, k, v, request, context, backend)
        return out if out.dtype == Q.dtype else out.to(Q.dtype)
    if request.mask is not None:
        check_tensor(request.mask_name, request.mask)
    mask, bias = split_mask(request, context, lambda mask: mask != 0)
    info = request.documents or documents(context)
    if info is not None:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q, k, v))  # [bsz * len, heads, head_dim]
    # Re-entrant checkpointing runs a layer twice, and both passes must run the same kernel.
    attend = partial(attention_of_layer, trains=True) if trains(context) else attention
    out = attend(
        q,
        k,
        v,
        **request.options,
        mask=mask,
        bias=bias,
        seq_info=info,
        backend=backend,
    )
    if info is not None:  # [bsz * q_len, heads, value_dim]
        out = out.reshape(context.bsz, context.q_len, context.n_heads, V.shape[3])
    return out if out.dtype == Q.dtype else out.to(Q.dtype)


def _cast_to_half(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns Q, K, V with float32 cast to the others' half dtype; unchanged under autocast, which casts them later."""
    half = computed_in(*map(dtype_name, tensors))
    if half is None or autocast_dtype(tensors[0].device) is not None:
        return tensors
    return tuple(tensor.to(getattr(torch, half)) for tensor in tensors)


def _backends(preferred: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Returns the backends of ``use_backend``, else the preferred ones; compiled code looks them up when it runs."""
    if preferred is None:
        return None
    return (FROM_CONTEXT, *preferred) if torch.compiler.is_compiling() else override.requested() or preferred


def select_attention_backend(use_varlen: bool = False, dropout_p: float = 0.0) -> str:
    """Returns the host's word for this machine's backend, in the host's order: flash-attn, xformers, SDPA.

    Packed rows (``use_varlen``) without dropout prefer SDPA to xformers, if torch's own flash kernel runs here.
    """
    return choose_word(available_here(), use_varlen, dropout_p)


def _attend_prefixes(
    q: Tensor, k: Tensor, v: Tensor, request: UnslothRequest, context: AttentionContext, backend: Any
) -> Tensor:
    """Returns ``[bsz, len, heads, value_dim]``: each token attends to its own run and to its group's shared prefix."""
    shared = shared_prefixes(request, context, _on_host)
    out = attention_of_layer(
        *(tensor.flatten(0, 1)[None] for tensor in (q, k, v)),  # [1, bsz * len, heads, head_dim]
        trains=trains(context),
        key_ranges=shared.key_ranges,
        softcap=request.softcap,
        scale=request.scale,
        deterministic=request.deterministic,
        invariant=request.invariant,
        backend=backend,
    )
    return out[0].unflatten(0, q.shape[:2])  # type: ignore[no-any-return]


def _on_host(labels: Any) -> Any:
    """Returns token labels as a numpy array; waits for a GPU."""
    return labels.cpu().numpy() if isinstance(labels, Tensor) else labels
