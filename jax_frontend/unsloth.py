"""Unsloth's ``run_attention`` for JAX arrays, and the types of its arguments (see attn_core.dropins.unsloth)."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

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
)
from attn_core.dropins.unsloth.prefix import resolve_prefix_seg_info, shared_prefixes
from attn_core.dropins.unsloth.request import UnslothRequest, interpret, split_mask
from attn_core.errors import SpecError
from attn_core.selection import override
from jax_frontend.attention import attention
from jax_frontend.backends import available_here
from jax_frontend.dispatch.plan import check_array, device_name

__all__ = [
    "AttentionConfig",
    "AttentionContext",
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "SDPA",
    "XFORMERS",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
]


Array = jax.Array


def run_attention(*, config: AttentionConfig, context: AttentionContext, Q: Array, K: Array, V: Array) -> Array:
    """Computes attention of ``Q [bsz, n_heads, q_len, head_dim]``, ``K, V [bsz, n_kv_heads, kv_len, head_dim]``.

    The call is causal unless an option dict, ``context.is_causal`` or a complete mask says otherwise. It is packed if
    ``context.seq_info`` is set, with the rows laid end to end, and has shared prefixes if ``context.prefix_seg_info``
    is set.
    ``config.backend`` is a preference: automatic choice runs the calls that its kernels cannot, with the same result.

    Returns:
        ``[bsz, q_len, n_heads, head_dim]`` in Q's dtype, even if a float32 Q is computed in the half dtype of K or V.

    Raises:
        SpecError and its subclasses: for contradictions, unknown keys and wrong sizes, before any kernel runs.
    """
    for name, array in (("Q", Q), ("K", K), ("V", V)):
        check_array(name, array)
    check_fields(config, context)
    check_sizes(config, context, Q.shape, K.shape, V.shape)
    request = interpret(config, context)
    backend = override.requested() or preference(config, "jax", device_name(Q), request.options.get("invariant"))
    half = computed_in(*map(dtype_name, (Q, K, V)))
    same_dtype = (array if half is None else array.astype(half) for array in (Q, K, V))
    q, k, v = (array.swapaxes(1, 2) for array in same_dtype)  # [bsz, len, heads, head_dim]
    if context.prefix_seg_info is not None:
        return _attend_prefixes(q, k, v, request, context, backend).astype(Q.dtype)
    if request.dropout and 0 < request.dropout < 1:  # attention raises an error for any other value
        raise SpecError(
            f"dropout_p={request.dropout}: expected 0, because run_attention has no argument for the PRNG key that "
            "dropout needs in JAX; call jax_frontend.attention with dropout_rng="
        )
    if request.mask is not None:
        check_array(request.mask_name, request.mask)
    mask, bias = split_mask(request, context, lambda mask: mask.astype(bool))
    info = request.documents or documents(context)
    if info is not None:
        q, k, v = (array.reshape(-1, *array.shape[2:]) for array in (q, k, v))  # [bsz * len, heads, head_dim]
    out = attention(
        q,
        k,
        v,
        **request.options,
        mask=mask,
        bias=bias,
        seq_info=info,
        backend=backend,
    )
    return out.reshape(context.bsz, context.q_len, context.n_heads, V.shape[3]).astype(Q.dtype)


def select_attention_backend(use_varlen: bool = False, dropout_p: float = 0.0) -> str:
    """Returns Unsloth's backend name for this machine, in Unsloth's order: flash-attn, xformers, SDPA.

    Packed rows (``use_varlen``) without dropout prefer SDPA to xformers, if torch's own flash kernel runs here.
    """
    return choose_word(available_here(), use_varlen, dropout_p)


def _attend_prefixes(
    q: Array, k: Array, v: Array, request: UnslothRequest, context: AttentionContext, backend: Any
) -> Array:
    """Returns ``[bsz, len, heads, value_dim]``: each token attends to its own run and to its group's shared prefix."""
    shared = shared_prefixes(request, context, np.asarray)
    out = attention(
        *(array.reshape(1, -1, *array.shape[2:]) for array in (q, k, v)),  # [1, bsz * len, heads, head_dim]
        key_ranges=shared.key_ranges,
        softcap=request.softcap,
        scale=request.scale,
        deterministic=request.deterministic,
        invariant=request.invariant,
        backend=backend,
    )
    return out.reshape(*q.shape[:2], *out.shape[2:])
