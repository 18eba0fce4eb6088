"""Unsloth's ``run_attention`` for JAX arrays, and the types of its arguments."""

from jax_frontend.unsloth.dispatch import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    resolve_prefix_seg_info,
    run_attention,
    select_attention_backend,
)

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
