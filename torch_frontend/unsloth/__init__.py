"""The names that Unsloth's models import: ``run_attention``, packed masks and labels, and softcapped attention.

``installed`` and ``install`` put them in the place of Unsloth's own.
"""

from typing import Any

from attn_core.dropins.unsloth.arguments import (
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
)
from attn_core.dropins.unsloth.prefix import resolve_prefix_seg_info
from torch_frontend.unsloth import dispatch
from torch_frontend.unsloth.dispatch import SDPA_HAS_GQA, run_attention, select_attention_backend
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


def __getattr__(name: str) -> Any:
    # Looked up on access: finding out takes time, and so does loading attention for decoding.
    if name in ("HAS_FLASH_ATTENTION", "HAS_XFORMERS", "decode_scaled_dot_product_attention"):
        return getattr(dispatch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
