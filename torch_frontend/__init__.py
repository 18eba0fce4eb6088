"""Attention for torch: one call, every kernel, and the reasons for the choice."""

from attn_core import NoBackendError, Selection, SeqInfo
from attn_core.override import use_backend
from torch_frontend.attention import attention, explain
from torch_frontend.backends import available_backends
from torch_frontend.qkvpacked import attention_qkvpacked
from torch_frontend.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    run_attention,
    select_attention_backend,
)
from torch_frontend.warm_up import warm_up

__all__ = [
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "SDPA",
    "XFORMERS",
    "AttentionConfig",
    "AttentionContext",
    "NoBackendError",
    "Selection",
    "SeqInfo",
    "attention",
    "attention_qkvpacked",
    "available_backends",
    "explain",
    "run_attention",
    "select_attention_backend",
    "use_backend",
    "warm_up",
]
