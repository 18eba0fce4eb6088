"""Unsloth's ``run_attention`` for JAX arrays, and the types of its arguments (see attn_core.dropins.unsloth)."""

from __future__ import annotations

import jax

from attn_core.call.tensors import dtype_name
from attn_core.dropins.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    choose_word,
    computed_in,
    prepare,
    resolve_prefix_seg_info,
)
from attn_core.errors import SpecError
from attn_core.selection import override
from jax_frontend.attention import attention
from jax_frontend.dispatch.plan import check_array, device_name
from jax_frontend.explain import available_here

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
    call = prepare("jax", device_name(Q), check_array, config, context, (Q, K, V))
    dropout = call.options.get("dropout")
    if dropout and 0 < dropout < 1:  # attention raises an error for any other value
        raise SpecError(
            f"dropout_p={dropout}: expected 0, because run_attention has no argument for the PRNG key that "
            "dropout needs in JAX; call jax_frontend.attention with dropout_rng="
        )
    half = computed_in(*map(dtype_name, (Q, K, V)))
    rows = call.rows(*(array if half is None else array.astype(half) for array in (Q, K, V)))
    out = attention(*rows, **call.options, backend=override.requested() or call.preferred)
    return call.split(out).astype(Q.dtype)


def select_attention_backend(use_varlen: bool = False, dropout_p: float = 0.0) -> str:
    """Returns Unsloth's backend name for this machine, in Unsloth's order: flash-attn, xformers, SDPA.

    Packed rows (``use_varlen``) without dropout prefer SDPA to xformers, if torch's own flash kernel runs here.
    """
    return choose_word(available_here(), use_varlen, dropout_p)
