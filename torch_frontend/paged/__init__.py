"""Attention over keys and values in pages, for torch."""

from torch_frontend.paged.attention import append_kv, explain_paged, paged_attention
from torch_frontend.paged.rotary import apply_rotary

__all__ = ["append_kv", "apply_rotary", "explain_paged", "paged_attention"]
