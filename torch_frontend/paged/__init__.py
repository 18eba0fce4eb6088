"""Attention over keys and values in pages, for torch."""

from torch_frontend.paged.append import append_kv
from torch_frontend.paged.attention import explain_paged, paged_attention
from torch_frontend.paged.cache import pages_of
from torch_frontend.paged.merge_states import merge_states
from torch_frontend.paged.rotary import apply_rotary

__all__ = [
    "append_kv",
    "apply_rotary",
    "explain_paged",
    "merge_states",
    "paged_attention",
    "pages_of",
]
