"""transformers' models under ``use_context_parallel``: which masks and arguments a row over several ranks can have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_core.errors import SpecError
from torch_frontend.context_parallel import use
from torch_frontend.context_parallel.use import Active
from torch_frontend.huggingface.described import DescribedMask, Visible

Tensor = torch.Tensor


@torch.compiler.disable
def mask(
    context: Active,
    batch: int,
    lengths: tuple[int, int],
    offsets: tuple[Any, int],
    read: Callable[[Callable[..., Any]], Any],
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    device: Any,
) -> DescribedMask:
    """What a layer may see of a whole row, from the mask that transformers would build for a shard.

    That one is by places in the shard, and tells documents apart where positions jump, as they do in shards; of it only
    the band counts. The documents are those of ``use_context_parallel(seq_info=...)``.

    Args:
        lengths, offsets: of (queries, keys), of the shard; ``read`` gives the Pattern of a mask function.

    Raises:
        SpecError: for a cache with content, padding, and mask functions that are no band.
    """
    if lengths[0] != lengths[1] or int(offsets[0]) != offsets[1]:
        _refuse_cache(lengths[0], lengths[1])
    _refuse_padding(context, attention_mask, lengths[1])
    pattern = read(mask_function)
    if pattern is None:
        raise SpecError(
            "attention_mask: expected a causal mask, a sliding window or none in context parallelism, got the mask "
            f"function {getattr(mask_function, '__qualname__', mask_function)!r}, which goes by places in a shard"
        )
    visible = Visible(pattern.left, pattern.right, 0, lengths, context=context)
    return DescribedMask(batch, device, visible, _no_table)


def of(module: Any, attention_mask: Any) -> Active | None:
    """What a layer runs under: as its mask says, or the block around it.

    Raises:
        SpecError: within a block, for a mask that was made outside.
    """
    if not isinstance(attention_mask, DescribedMask):
        return use.of(module)
    context = attention_mask.visible.context
    if context is None and use.active() is not None:
        raise SpecError("attention_mask: expected one made within the block of use_context_parallel, or None")
    return context


def refuse(given: Mapping[str, Any], q: Tensor, k: Tensor) -> None:
    """Raises SpecError for arguments of a layer, q and k ``[batch, len, heads, dim]``, that ranks cannot share."""
    for name, value in given.items():
        if value is not None and not isinstance(value, DescribedMask):
            raise SpecError(
                f"{name}: expected None in context parallelism; use_context_parallel(seq_info=...) takes a row's "
                "documents, and other masks and biases would have to be cut for every rank"
            )
    if q.shape[1] != k.shape[1]:
        _refuse_cache(q.shape[1], k.shape[1])


def _refuse_cache(queries: int, keys: int) -> None:
    raise SpecError(
        f"past_key_values: expected none with content in context parallelism, got {keys} keys for {queries} queries; "
        "each rank would see its own part alone. Decode outside use_context_parallel, with the whole row's cache"
    )


def _refuse_padding(context: Active, attention_mask: Tensor | None, keys: int) -> None:
    if attention_mask is None:
        return
    if attention_mask.dim() != 2 or attention_mask.shape[1] != keys:
        raise SpecError(
            f"attention_mask: expected this rank's shard [batch, {keys}], got shape {list(attention_mask.shape)}; "
            "leave it out, or cut it with shard_sequence"
        )
    hidden = int((attention_mask[:, : context.held(keys)] == 0).sum())
    if hidden:
        raise SpecError(
            f"attention_mask: expected no padding in context parallelism, got {hidden} tokens of it; pack documents "
            "in one row, and tell use_context_parallel their seq_info"
        )


def _no_table() -> Tensor:
    raise SpecError(
        "attention_mask: expected a model that hands its mask on to attention in context parallelism; a table of what "
        "a shard sees of itself says nothing of the row"
    )
