"""Attention for JAX: one call, every kernel, under every transformation, and the reasons for the choice."""

from attn_core import NoBackendError, Pages, Selection, SeqInfo
from jax_frontend.attention import attention, explain
from jax_frontend.backends import available_backends
from jax_frontend.context_parallel.attention import (
    context_parallel_attention,
    explain_context_parallel,
    shard_sequence,
    unshard_sequence,
)
from jax_frontend.dot_product_attention import dot_product_attention
from jax_frontend.export import export_checks
from jax_frontend.override import use_backend
from jax_frontend.paged.attention import append_kv, explain_paged, paged_attention
from jax_frontend.paged.cache import PagedKVCache
from jax_frontend.qkvpacked import attention_qkvpacked
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
from jax_frontend.warm_up import warm_up

__all__ = [
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "SDPA",
    "XFORMERS",
    "AttentionConfig",
    "AttentionContext",
    "NoBackendError",
    "PagedKVCache",
    "Pages",
    "Selection",
    "SeqInfo",
    "append_kv",
    "attention",
    "attention_qkvpacked",
    "available_backends",
    "context_parallel_attention",
    "dot_product_attention",
    "explain",
    "explain_context_parallel",
    "explain_paged",
    "export_checks",
    "paged_attention",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
    "shard_sequence",
    "unshard_sequence",
    "use_backend",
    "warm_up",
]
