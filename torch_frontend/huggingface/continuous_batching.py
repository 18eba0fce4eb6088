"""transformers' continuous batching (``generate_batch``): attention of packed queries to keys in its paged cache.

The manager refuses unknown names of attention, so ``register`` wraps the method that checks them. Our names then stay
on the model. ``cache.update`` writes the new keys and returns those of all sequences end to end, as for
transformers' own FlashAttention, and attention runs on packed documents.
Upstream: ``ContinuousBatchingManager.switch_to_cb_friendly_attn`` and ``PagedAttentionCache.update``. In 5.17
``update`` takes indices and returns ``[tokens, kv_heads, dim]``; in 5.23 it takes all keywords of the layer and returns
``[1, kv_heads, tokens, dim]``; in 5.24 the model's own layers call it.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch

from attn_core.errors import SpecError, shown
from torch_frontend.context_parallel.layers import active_block
from torch_frontend.huggingface.described_mask import DescribedMask, Mask, description_of
from torch_frontend.huggingface.layer_call import check_window, documents_from_offsets
from torch_frontend.recomputed import attention_of_heads as attention

Tensor = torch.Tensor

METHOD = "switch_to_cb_friendly_attn"
OF_CACHE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k")
"""Keywords that describe the packed sequences; the last two are older names of the two before them."""
_OF_UPDATE = ("read_index", "write_index", "block_table")
_OF_LOGITS = ("logits_indices", "logits_processor_args")
"""Keywords that models may hand to their layers, and that concern the head alone."""


def attend_to_cache(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: Any,
    sliding_window: int | None,
    keywords: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Tensor, None]:
    """Writes a layer's new keys and values into the cache, and attends to those of each query's sequence.

    Args:
        query: ``[1, heads, tokens, head_dim]``, the new tokens of all sequences end to end; key, value alike.
        cache: transformers' ``PagedAttentionCache``; None if key and value are already those of all sequences.
        keywords: the layer's keywords of continuous batching.
        options: softcap, scale, sinks, dropout, deterministic and backend of ``attention``.

    Returns:
        ``([1, tokens, heads, value_dim], None)``.

    Raises:
        SpecError: for a block table, which only transformers' own kernels read, and for missing keywords.
    """
    if keywords.get("block_table") is not None:
        raise SpecError(
            "block_table: expected None, because attn_core reads the cache by its indices; set "
            "max_blocks_per_request=0 in the ContinuousBatchingConfig"
        )
    if cache is not None and not hasattr(cache, "update"):
        raise SpecError(f"cache: expected transformers' PagedAttentionCache, got {type(cache).__name__}")
    present = {name: value for name, value in keywords.items() if value is not None}
    missing = [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index") if name not in present]
    if missing:
        raise SpecError(f"{', '.join(missing)}: expected a value, as continuous batching passes it beside its cache")
    keys, values, of_keys, longest = _updated(module, key, value, cache, sliding_window, present)
    info = documents_from_offsets(
        present.get("cu_seq_lens_q"), of_keys, present.get("max_length_q", present.get("max_seqlen_q")), longest
    )
    out: Any = attention(
        query, keys, values, causal=True, window=sliding_window, seq_info=info, trains=False, **options
    )
    return out.contiguous(), None


def window_of(attention_mask: Mask, sliding_window: int | None, is_causal: bool | None) -> int | None:
    """Returns the window of a layer that reads a paged cache, from the model's mask and the layer's argument.

    Raises:
        SpecError: for attention that is not causal, and for a mask that is more than causal with a window.
    """
    if active_block() is not None:
        raise SpecError("cache: expected none inside use_context_parallel, because a paged cache has whole rows")
    if is_causal is False:
        raise SpecError("is_causal=False: expected causal attention in continuous batching")
    if attention_mask is None:
        return sliding_window
    described = attention_mask if type(attention_mask) is DescribedMask else description_of(attention_mask)
    if described is None or described.visible.right != 0 or described.visible.key_ranges is not None:
        raise SpecError(
            "attention_mask: expected the model's own causal mask, with a window or without, in continuous batching, "
            f"got {shown(attention_mask) if described is None else described.visible}"
        )
    check_window(described.visible, sliding_window)
    left = described.visible.left
    return sliding_window if left is None else left + 1


def _updated(
    module: torch.nn.Module, key: Tensor, value: Tensor, cache: Any, sliding_window: int | None, present: dict[str, Any]
) -> tuple[Tensor, Tensor, Any, Any]:
    """Returns the keys and values of all sequences, ``[1, kv_heads, tokens, dim]``, their offsets, and the longest."""
    if cache is None:
        return key, value, present["cu_seq_lens_k"], present["max_length_k"]
    if _takes_keywords(type(cache)):  # type: ignore[arg-type]
        present = {"block_table": None, **present}  # updated in place
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=present)
        return key, value, present["cu_seq_lens_k"], present["max_length_k"]
    indices = {name: present[name] for name in ("read_index", "write_index")}
    key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **indices)
    offsets, longest = present["cu_seq_lens_k"], present.get("max_length_k", present.get("max_seqlen_k"))
    if isinstance(offsets, dict):  # one entry for each kind of layer
        kind = "full_attention" if sliding_window is None else "sliding_attention"
        offsets, longest = offsets[kind], longest[kind]  # type: ignore[index]
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None], offsets, longest


@lru_cache(maxsize=16)
def _takes_keywords(kind: type) -> bool:
    return "kwargs" in inspect.signature(kind.update).parameters  # type: ignore[attr-defined]


def take_keywords(others: dict[str, Any]) -> dict[str, Any]:
    """Removes the keywords of continuous batching from ``others``, and returns those that the cache needs."""
    for name in _OF_LOGITS:
        others.pop(name, None)
    return {name: others.pop(name) for name in (*OF_CACHE, *_OF_UPDATE) if name in others}


def refuse_prefix(requested: str, name: str) -> None:
    """Raises SpecError for ``"paged|attn_core"``: what older versions call our name, or a prefix that is not needed."""
    import transformers

    takes = "takes" if hasattr(manager(), METHOD) else "cannot take"
    raise SpecError(
        f"attn_implementation={requested!r}: expected {name!r} without paged|; generate_batch of the installed "
        f"transformers {transformers.__version__} {takes} it, versions from 5.17 on do"
    )


def manager() -> type | None:
    """Returns the class that runs continuous batching; None in versions without it."""
    try:
        from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    except ImportError:
        return None
    return ContinuousBatchingManager
