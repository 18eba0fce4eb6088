"""Masks and argument checks of transformers' models under ``use_context_parallel``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_core.errors import SpecError
from torch_frontend.context_parallel.layers import ActiveMesh, active_for, active_mesh
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.huggingface.described_mask import DescribedMask, Mask, VisibleKeys

Tensor = torch.Tensor


def mask(context: ActiveMesh, *arguments: Any) -> DescribedMask:
    """Returns ``_mask``; the other ranks hear of a refusal."""
    return context.tell(_mask, context, *arguments)


def _mask(
    context: ActiveMesh,
    batch: int,
    lengths: tuple[int, int],
    offsets: tuple[int | Tensor, int],
    mask_function: Callable[..., object],
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> DescribedMask:
    """Returns the mask of a whole row, from the mask function that transformers built for a shard.

    Only the band (causal, window) of that function counts. Its indices are places in the shard, and it starts a
    document wherever positions jump, which they also do between a shard's runs. The documents come from
    ``use_context_parallel(seq_info=...)`` instead.

    Args:
        lengths, offsets: of (queries, keys), in the shard.

    Raises:
        SpecError: for a cache with content, for an attention_mask of another length than the shard, for padding, and
            for a mask function that is not a band.
    """
    from torch_frontend.huggingface.patterns import read_pattern  # here, because it imports transformers

    if lengths[0] != lengths[1] or int(offsets[0]) != offsets[1]:
        # Without a cache, transformers takes the number of keys from the mask.
        if int(offsets[0]) == 0:
            _check_length(attention_mask, lengths[0])
        _refuse_cache(lengths[0], lengths[1])
    _check_length(attention_mask, lengths[1])
    _refuse_padding(context, attention_mask, lengths[1])
    pattern = read_pattern(mask_function)
    if pattern is None or pattern.blocks is not None:
        raise SpecError(
            "attention_mask: expected a causal mask, a sliding window or none in context parallelism, got the mask "
            f"function {getattr(mask_function, '__qualname__', mask_function)!r}, whose indices are places in a shard"
        )
    visible = VisibleKeys(pattern.left, pattern.right, 0, lengths, context=context)
    return DescribedMask(batch, device, visible, lambda: context.tell(_no_table))


def _leave_to_python() -> None:
    """Makes Dynamo call ``mask`` instead of tracing it: it reads meshes, which Dynamo cannot trace."""
    globals()["mask"] = torch.compiler.disable(mask)


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo


def context_of(module: torch.nn.Module, attention_mask: Mask) -> ActiveMesh | None:
    """Returns the ``use_context_parallel`` block of a layer's described mask, otherwise the block around the layer.

    Raises:
        SpecError: inside a block, for a mask that was built outside of it.
    """
    if not isinstance(attention_mask, DescribedMask):
        return active_for(module)
    context, around = attention_mask.visible.context, active_mesh()
    if context is None and around is not None:
        around.tell(_refuse_earlier_mask)
    return context


def check_arguments(tables: Mapping[str, object], q: Tensor, k: Tensor) -> None:
    """Raises SpecError for a layer's masks, biases and caches, which are not supported in context parallelism.

    Args:
        tables: arguments that must be None or a described mask.
        q, k: ``[batch, len, heads, dim]``.
    """
    for name, value in tables.items():
        if value is not None and not isinstance(value, DescribedMask):
            raise SpecError(
                f"{name}: expected None in context parallelism; pass a row's documents to "
                "use_context_parallel(seq_info=...); other masks and biases are not split over ranks"
            )
    if q.shape[1] != k.shape[1]:
        _refuse_cache(q.shape[1], k.shape[1])


def _refuse_cache(queries: int, keys: int) -> None:
    raise SpecError(
        f"past_key_values: expected none with content in context parallelism, got {keys} keys for {queries} queries; "
        "each rank would see only its own part. Decode outside use_context_parallel, with the whole row's cache"
    )


def _check_length(attention_mask: Tensor | None, shard: int) -> None:
    if attention_mask is not None and (attention_mask.dim() != 2 or attention_mask.shape[1] != shard):
        raise SpecError(
            f"attention_mask: expected this rank's shard [batch, {shard}], got shape {list(attention_mask.shape)}; "
            "leave it out, or cut it with shard_sequence"
        )


def _refuse_padding(context: ActiveMesh, attention_mask: Tensor | None, keys: int) -> None:
    """Raises SpecError for a mask that hides tokens: context parallelism has no masks."""
    if attention_mask is None:
        return
    hidden = int((attention_mask[:, : context.position_count(keys)] == 0).sum())
    if hidden:
        raise SpecError(
            f"attention_mask: expected no padding in context parallelism, got {hidden} tokens of it; pack documents "
            "in one row, and pass their seq_info to use_context_parallel"
        )


def _refuse_earlier_mask() -> None:
    raise SpecError("attention_mask: expected one built inside the use_context_parallel block, or None")


def _no_table() -> Tensor:
    raise SpecError(
        "attention_mask: expected a model that hands its mask on to attention in context parallelism; a dense mask "
        "of one shard cannot describe the whole row"
    )
