"""Attention on keys and values in pages, for JAX."""

from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import explain_paged, paged_attention
from jax_frontend.paged.cache import pages_of
from jax_frontend.paged.merge_states import merge_states
from jax_frontend.paged.rotary import apply_rotary

__all__ = [
    "append_kv",
    "apply_rotary",
    "explain_paged",
    "merge_states",
    "paged_attention",
    "pages_of",
]
