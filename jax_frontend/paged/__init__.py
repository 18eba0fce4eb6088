"""Attention on keys and values in pages, for JAX."""

from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import explain_paged, paged_attention
from jax_frontend.paged.rotary import apply_rotary

__all__ = ["append_kv", "apply_rotary", "explain_paged", "paged_attention"]
