"""Attention for torch: one call, every kernel, and the reasons for the choice."""

from typing import Any

import torch.distributed

from attn_core import NoBackendError, Pages, Selection, SeqInfo
from attn_core.selection.override import use_backend
from torch_frontend import flops  # noqa: F401  tells torch's counter
from torch_frontend.attention import attention, explain
from torch_frontend.backends import available_backends
from torch_frontend.context_parallel.use import use_context_parallel
from torch_frontend.paged.attention import append_kv, explain_paged, paged_attention
from torch_frontend.paged.cache import PagedKVCache
from torch_frontend.qkvpacked import attention_qkvpacked
from torch_frontend.unsloth import (
    FLASH_DENSE,
    FLASH_VARLEN,
    HAS_FLEX_ATTENTION,
    SDPA,
    SDPA_HAS_GQA,
    XFORMERS,
    AttentionConfig,
    AttentionContext,
    build_sdpa_packed_attention_mask,
    build_xformers_block_causal_mask,
    create_flex_attention_causal_mask,
    create_flex_attention_sliding_window_mask,
    get_packed_info_from_kwargs,
    mask_packed_boundary_labels,
    mask_packed_sequence_boundaries,
    resolve_prefix_seg_info,
    run_attention,
    select_attention_backend,
    slow_attention_softcapping,
    slow_inference_attention_softcapping,
)
from torch_frontend.warm_up import warm_up

__all__ = [
    "FLASH_DENSE",
    "FLASH_VARLEN",
    "HAS_FLASH_ATTENTION",
    "HAS_FLEX_ATTENTION",
    "HAS_XFORMERS",
    "SDPA",
    "SDPA_HAS_GQA",
    "XFORMERS",
    "AttentionConfig",
    "AttentionContext",
    "NoBackendError",
    "PagedKVCache",
    "Pages",
    "Selection",
    "SeqInfo",
    "append_kv",
    "attention",
    "attention_qkvpacked",
    "available_backends",
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "create_flex_attention_causal_mask",
    "create_flex_attention_sliding_window_mask",
    "explain",
    "explain_paged",
    "get_packed_info_from_kwargs",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
    "paged_attention",
    "resolve_prefix_seg_info",
    "run_attention",
    "select_attention_backend",
    "slow_attention_softcapping",
    "slow_inference_attention_softcapping",
    "use_backend",
    "use_context_parallel",
    "warm_up",
]

if torch.distributed.is_available():  # torch can be built without it
    from torch_frontend.context_parallel.attention import (
        context_parallel_attention,
        explain_context_parallel,
        shard_sequence,
        unshard_sequence,
    )

    __all__ += ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]


def __getattr__(name: str) -> Any:
    if name in ("context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"):
        raise ImportError(f"torch_frontend.{name} needs torch.distributed, which this build of torch does not have")
    if name in ("HAS_FLASH_ATTENTION", "HAS_XFORMERS"):  # what is installed is looked up when it is asked for
        from torch_frontend.unsloth import dispatch

        return getattr(dispatch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
