"""transformers' mask interface: returns a description of the visible keys instead of a query-by-key table.

transformers writes a mask as a function of indices, built from a few named parts. Known parts become options of the
attention call (causal, window, documents, padding keys). Any other function becomes the dense mask that transformers
itself would build from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import masking_utils  # at module level, because older compilers cannot trace a lazy module's import

from attn_core.backends.shared import aten_masks
from attn_core.context_parallel import one_device, ranges
from attn_core.errors import SpecError
from torch_frontend.context_parallel.layers import active_mesh
from torch_frontend.dispatch.transforms import is_one_op
from torch_frontend.huggingface import context as huggingface_context
from torch_frontend.huggingface.described_mask import DescribedMask, VisibleKeys, describe, needs_floats
from torch_frontend.huggingface.layer_call import documents_from_numbers
from torch_frontend.huggingface.patterns import Pattern, infer_pattern, read_pattern

Tensor = torch.Tensor


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., object],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | DescribedMask:
    """Returns a DescribedMask, or the dense bool mask if no pattern describes the mask function.

    Outside compilation this reads the values of ``attention_mask`` (and of a static cache's offset) once for all
    layers, so that a batch without padding needs no mask at all. The description keeps the present values, even if a
    cache or the caller writes to them later.

    Returns:
        DescribedMask, or bool ``[batch, 1, q_length, kv_length]``.
    """
    if isinstance(attention_mask, DescribedMask):  # generate built it and passes it to the mask function
        return attention_mask
    context = active_mesh()
    if context is not None:
        lengths, offsets = (q_length, kv_length), (q_offset, kv_offset)
        return huggingface_context.mask(context, batch_size, lengths, offsets, mask_function, attention_mask, device)
    # Without skips, because transformers then returns None for a mask that SDPA can express by is_causal.
    whole = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset}
    of_call = {**sizes, "mask_function": mask_function}
    if needs_floats(options.get("config")):
        given = {"q_offset": q_offset, "attention_mask": attention_mask}
        return masking_utils.eager_mask(**of_call, **given, **options | whole)
    dense = partial(masking_utils.sdpa_mask, **of_call, **whole, use_vmap=options.get("use_vmap", False))
    compiling = torch.compiler.is_compiling()
    causal = "allow_is_bidirectional_skip" not in options
    steps = q_length == 1 and causal and not options.get("allow_is_causal_skip", True)  # decoding that may be compiled
    if steps or (compiling and isinstance(q_offset, Tensor)):
        # One row of keys is as small as a description, and its values may change without a recompilation.
        pattern = None if compiling else read_pattern(mask_function)
        if pattern is None or pattern.right != 0 or pattern.documents is not None or q_length != 1:
            table = dense(q_offset=q_offset, attention_mask=attention_mask)
        else:
            table = row_of_keys(pattern.left, batch_size, kv_length, (q_offset, kv_offset), attention_mask, device)
        if compiling or is_one_op(table):
            return table
        table = table.contiguous()  # as generate makes it, and a copy would lose what is attached here
        if table.device.type != "cpu":
            aten_masks.keep_additive(table)
            return table
        # Values on the CPU can be read, so layers that are not compiled leave hidden keys out.
        described = _describe(table.shape, (int(q_offset), kv_offset), pattern, attention_mask, device, dense)
        if isinstance(described, DescribedMask):
            describe(table, described)
        return table
    pattern = infer_pattern(mask_function, options) if compiling else read_pattern(mask_function)
    shape = batch_size, 1, q_length, kv_length
    return _describe(shape, (int(q_offset), kv_offset), pattern, attention_mask, device, dense)


def _describe(
    shape: Sequence[int],
    offsets: tuple[int, int],
    pattern: Pattern | None,
    attention_mask: Tensor | None,
    device: torch.device | str,
    dense: Callable[..., Tensor],
) -> DescribedMask | Tensor:
    """Returns the mask of a pattern and a padding mask as a DescribedMask, or the dense mask if it cannot be described.

    Args:
        shape: ``[batch, 1, q_len, kv_len]``.
        offsets: of (queries, keys). An int of ours, because the cache advances its tensor in place.
    """
    (batch, _, q_length, kv_length), (q_offset, kv_offset) = shape, offsets
    offset = q_offset - kv_offset
    if pattern is not None and pattern.blocks is not None:
        keys = visible_keys(attention_mask, kv_length, kv_offset)
        lengths = q_length, kv_length
        found = ranges_of_blocks(pattern.blocks, pattern.left, lengths, offsets, keys)
        if found is None:
            return dense(q_offset=q_offset, attention_mask=attention_mask)
        build = partial(dense, q_offset=q_offset, attention_mask=_copied(attention_mask))
        return DescribedMask(batch, device, VisibleKeys(None, None, 0, lengths, key_ranges=found), build)
    if pattern is None or not is_alignable(pattern, offset, q_length, kv_length):
        return dense(q_offset=q_offset, attention_mask=attention_mask)
    keys = visible_keys(attention_mask, kv_length, kv_offset)
    if keys is not None and not torch.compiler.is_compiling():
        # A causal mask hides the keys behind the last query anyway: they are the unused rest of a static cache.
        reached = keys[:, : offset + q_length] if pattern.right == 0 else keys
        if bool(reached.all()):
            attention_mask = keys = None
    if attention_mask is not None:
        attention_mask = _copied(attention_mask)
        keys = visible_keys(attention_mask, kv_length, kv_offset)
    info = None if pattern.documents is None else documents_from_numbers(pattern.documents)
    visible = VisibleKeys(pattern.left, pattern.right, offset, (q_length, kv_length), keys, info)
    return DescribedMask(batch, device, visible, partial(dense, q_offset=q_offset, attention_mask=attention_mask))


def _copied(attention_mask: Tensor | None) -> Tensor | None:
    """Returns a bool copy of a padding mask, because the caller may change it before the dense mask is built."""
    return None if attention_mask is None else attention_mask.to(torch.bool, copy=True)


def row_of_keys(
    left: int | None,
    batch: int,
    kv_length: int,
    offsets: tuple[int | Tensor, int],
    attention_mask: Tensor | None,
    device: torch.device | str,
) -> Tensor:
    """Returns the dense mask of one causal query, bool ``[batch, 1, 1, kv_length]``, with few operations.

    transformers' own function evaluates the mask function on four tensors of indices, in about 15 operations.

    Args:
        left: the number of keys that the query sees before its own; None for all.
        offsets: of (queries, keys); the first may be a tensor on the device, which is not read.
    """
    q_offset, kv_offset = offsets
    places = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    seen = places <= q_offset
    if left is not None:
        seen = seen & (places >= q_offset - left)
    keys = visible_keys(attention_mask, kv_length, kv_offset)
    seen = seen.expand(batch, kv_length) if keys is None else seen & keys.to(torch.bool)
    return seen[:, None, None, :]


def is_alignable(pattern: Pattern, offset: int, q_length: int, kv_length: int) -> bool:
    """Returns whether one of attention's two alignments gives this offset after hidden keys are cut off."""
    if (pattern.left, pattern.right) == (None, None) or offset + q_length == kv_length:
        return True
    return offset == 0 if pattern.right != 0 else offset >= 0 and offset + q_length < kv_length


def visible_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Returns a padding mask ``[batch, tokens]`` cut and padded to the call's keys, ``[batch, kv_length]``.

    Keys behind the mask's end are hidden.

    Raises:
        SpecError: for a mask that does not have two axes.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise SpecError(
            f"attention_mask: expected [batch, tokens], or a complete mask of 4 axes, got shape "
            f"{list(attention_mask.shape)}"
        )
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def ranges_of_blocks(
    block_ids: Tensor, left: int | None, lengths: tuple[int, int], offsets: tuple[int, int], keys: Tensor | None
) -> np.ndarray | None:
    """Returns the mask "causal, or both in one block" as key ranges; None if a dense mask is the better form.

    A dense mask is better for short rows, and if kernels without key ranges cannot compute the ranges in parts.

    Args:
        block_ids: ``[batch, tokens]``, the block of each token, -1 for none. Reading it waits for the device.
        left: how many keys a query sees before its own; None for all.
        lengths, offsets: of (queries, keys), in tokens of the row.
        keys: ``[batch, kv_len]``, 0 or False for padding; or None.

    Returns:
        int32 ``[batch or 1, 1, kv_len, 1 or 2, 2]``.
    """
    (q_len, kv_len), (q_offset, k_offset) = lengths, offsets
    kind = "cuda" if block_ids.is_cuda else "cpu"
    if q_len * kv_len // 2 < one_device.FEWEST_PAIRS[kind]:
        return None
    ids = block_ids.cpu().numpy()
    spans = [_spans(row) for row in ids]
    if ids.shape[1] < k_offset + kv_len or any(span is None for span in spans):
        return None
    token = np.arange(k_offset, k_offset + kv_len)
    starts = np.broadcast_to(token - q_offset, (len(ids), kv_len))
    stops = np.full_like(starts, q_len) if left is None else starts + left + 1
    of_block = np.stack([span[k_offset : k_offset + kv_len] for span in spans if span is not None]) - q_offset
    both = np.stack([np.stack([starts, stops], -1), of_block], 2)  # [batch, kv_len, 2, 2]
    both = np.clip(both, 0, q_len)
    if keys is not None:
        both[~keys.bool().cpu().numpy()] = 0
    both = np.where(both[..., :1] < both[..., 1:], both, 0)[:, None].astype(np.int32)
    if len(both) > 1 and (both == both[:1]).all():
        both = both[:1]
    in_parts = all(ranges.bands_of(row[0].tobytes(), 2, q_len, (None, None)) is not None for row in both)
    return both if in_parts else None


def _spans(ids: np.ndarray) -> np.ndarray | None:
    """Returns the first token and the one behind the last of each token's block, ``[tokens, 2]``; an empty span for no
    block. None if a block is not in one piece."""
    edges = np.flatnonzero(np.diff(ids)) + 1
    first, stop = np.concatenate([[0], edges]), np.concatenate([edges, [len(ids)]])
    names = ids[first]
    numbers = names[names >= 0]
    if len(np.unique(numbers)) < len(numbers):
        return None
    length = stop - first
    return np.repeat(np.stack([first, np.where(names >= 0, stop, first)], -1), length, axis=0)
