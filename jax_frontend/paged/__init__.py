"""Attention on keys and values in pages, for JAX."""

from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import explain_paged, paged_attention

__all__ = ["append_kv", "explain_paged", "paged_attention"]
