"""The names that Unsloth's models import: ``run_attention``, packed masks and labels, and softcapped attention.

``installed`` and ``install`` put them in the place of Unsloth's own.
"""

from collections.abc import Callable
from typing import Any

from attn_core.dropins.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    choose_word,
    resolve_prefix_seg_info,
)
from torch_frontend.backends import available_here
from torch_frontend.unsloth.dispatch import run_attention, select_attention_backend
from torch_frontend.unsloth.packing import (
    build_sdpa_packed_attention_mask,
    build_xformers_block_causal_mask,
    cover_padded_cu_seqlens,
    get_packed_info_from_kwargs,
    mask_packed_boundary_labels,
    mask_packed_sequence_boundaries,
    move_xformers_attention_bias,
)
from torch_frontend.unsloth.patching import install, installed, is_installed, uninstall
from torch_frontend.unsloth.softcapping import (
    HAS_FLEX_ATTENTION,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)

__all__ = [
    "AttentionConfig",
    "AttentionContext",
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "HAS_FLASH_ATTENTION",
    "HAS_FLEX_ATTENTION",
    "HAS_XFORMERS",
    "SDPA",
    "SDPA_HAS_GQA",
    "XFORMERS",
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "cover_padded_cu_seqlens",
    "create_flex_attention_causal_mask",
    "create_flex_attention_sliding_window_mask",
    "decode_scaled_dot_product_attention",
    "get_packed_info_from_kwargs",
    "install",
    "installed",
    "is_installed",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
    "move_xformers_attention_bias",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
    "slow_attention_softcapping",
    "slow_inference_attention_softcapping",
    "uninstall",
]


SDPA_HAS_GQA = True
"""Whether torch's own attention supports grouped heads: True for every torch that this package supports."""

decode_scaled_dot_product_attention: Callable[..., Any]
"""Attention with the signature of torch's own function, which decoding calls; loads at first use."""
HAS_FLASH_ATTENTION: bool
"""Whether a FlashAttention package runs on this machine; looked up on access."""
HAS_XFORMERS: bool
"""Whether xformers runs on this machine; looked up on access."""


def __getattr__(name: str) -> Any:
    if name == "decode_scaled_dot_product_attention":
        from torch_frontend.finetrainers import attention_dispatch  # loads at first use, like this drop-in everywhere

        return attention_dispatch
    if name == "HAS_FLASH_ATTENTION":
        return choose_word(available_here(), use_varlen=True) == FLASH_VARLEN
    if name == "HAS_XFORMERS":
        return "xformers" in available_here()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
