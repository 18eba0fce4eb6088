"""Finetrainers' ``attention_dispatch`` and ``attention_provider`` on our kernels.

``installed`` and ``install`` register our attention as a provider of Finetrainers itself.
"""

from torch_frontend.finetrainers.dispatch import (
    AttentionProvider,
    attention_dispatch,
    attention_provider,
    list_providers,
)
from torch_frontend.finetrainers.registration import install, installed, is_installed, uninstall

__all__ = [
    "AttentionProvider",
    "attention_dispatch",
    "attention_provider",
    "install",
    "installed",
    "is_installed",
    "list_providers",
    "uninstall",
]
