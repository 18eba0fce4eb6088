"""Finetrainers' ``attention_dispatch`` and ``attention_provider`` on our kernels."""

from torch_frontend.finetrainers.dispatch import (
    AttentionProvider,
    attention_dispatch,
    attention_provider,
    list_providers,
)

__all__ = ["AttentionProvider", "attention_dispatch", "attention_provider", "list_providers"]
