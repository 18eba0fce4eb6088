"""Attention for torch: one call, every kernel, and the reasons for the choice."""

from attn_core import NoBackendError, Selection, SeqInfo
from attn_core.override import use_backend
from torch_frontend.attention import attention, explain

__all__ = ["NoBackendError", "Selection", "SeqInfo", "attention", "explain", "use_backend"]
