"""transformers' blocks of tokens that see each other in a causal row, such as images, as key ranges."""

from __future__ import annotations

import numpy as np
import torch

from attn_core.context_parallel import one_device, ranges

Tensor = torch.Tensor


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
