"""Masks of rows in the order of their tokens: prefixes, blocks, windows beside global tokens, documents."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.options import normalise_window
from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError, shown
from attn_core.masks.values import check_length, check_lengths, ranges_of, starts_of


def prefix_lm(lengths: Any, tokens: int) -> np.ndarray:
    """Returns the mask of a prefix-LM: the prefix sees itself in both directions, the rest is causal.

    ``q sees k iff k < length or k <= q``. Call attention without ``causal``, which would hide the prefix from itself.

    Args:
        lengths: the tokens of the prefix; an int, or ints ``[batch]``, one for each row.
        tokens: of a row, queries and keys alike.

    Returns:
        int32 ``[batch or 1, 1, tokens, 1, 2]``.

    Raises:
        ShapeError, SpecError: for a length that is negative or beyond ``tokens``, or no whole number.
    """
    tokens = check_length("tokens", tokens)
    if is_host_int(lengths):
        lengths = [lengths]
    prefix = check_lengths("lengths", lengths)[:, None]
    if (prefix > tokens).any():
        raise ShapeError(f"lengths: expected at most tokens={tokens}, got {int(prefix.max())}")
    keys = np.arange(tokens)
    return ranges_of((np.where(keys < prefix, 0, keys), tokens))


def blocks(starts: Any, bidirectional: Any, tokens: int) -> np.ndarray:
    """Returns a causal mask with blocks that see themselves in both directions: images in text, block-causal models.

    ``q sees k iff k <= q, or both are in one block that is bidirectional``. Call attention without ``causal``.

    Args:
        starts: the first token of each block, ascending from 0: ints ``[blocks]``. A block ends where the next begins.
        bidirectional: bool ``[blocks]``, or one bool for all: text is False, an image is True.
        tokens: of a row, queries and keys alike.

    Returns:
        int32 ``[1, 1, tokens, 1, 2]``.

    Raises:
        ShapeError, SpecError: for starts that do not ascend from 0 or lie beyond ``tokens``, and for flags that are no
            bools or of another number.
    """
    tokens, first = check_length("tokens", tokens), check_lengths("starts", starts)
    if not len(first) or first[0] != 0 or (np.diff(first) <= 0).any() or (tokens and first[-1] >= tokens):
        raise SpecError(f"starts={shown(starts)}: expected ascending numbers from 0 to below tokens={tokens}")
    flags = np.asarray(bidirectional)
    if flags.dtype != bool or flags.shape not in ((), first.shape):
        wrong = f"bidirectional={shown(bidirectional)}"
        raise SpecError(f"{wrong}: expected a bool, or one for each of {len(first)} blocks")
    keys = np.arange(tokens)
    block = np.searchsorted(first, keys, side="right") - 1
    whole = np.broadcast_to(flags, first.shape)[block]
    return ranges_of((np.where(whole, first[block], keys), tokens))


def global_and_window(
    global_tokens: int, window: int | tuple[int | None, int | None], tokens: int, *, causal: bool = False
) -> np.ndarray:
    """Returns a sliding window beside global tokens, the first ones of a row, which see all and are seen by all.

    ``q sees k iff q < global_tokens or k < global_tokens or -left <= k - q <= right``, and with ``causal`` only if
    ``k <= q``. With it, global tokens are the sinks of StreamingLLM.

    Args:
        global_tokens: their number, at most ``tokens``.
        window: inclusive distances ``(left, right)``, None unbounded; an int W means ``(W - 1, 0)`` with ``causal``,
            as in ``attention``.
        tokens: of a row, queries and keys alike.

    Returns:
        int32 ``[1, 1, tokens, 2, 2]``.

    Raises:
        ShapeError, SpecError: for a number or a window that is none.
    """
    tokens = check_length("tokens", tokens)
    first = check_length("global_tokens", global_tokens, most=tokens)
    left, right = (tokens if side is None else side for side in normalise_window(window, causal))
    keys = np.arange(tokens)
    is_global = keys < first
    # A key sees who sees it: q - k lies between -right and left.
    start, stop = np.maximum(keys - right, 0), np.minimum(keys + left + 1, tokens)
    start, stop = np.where(is_global, 0, start), np.where(is_global, tokens, stop)
    # The global queries are the first ones, so their range may touch the window's; the union counts.
    of_global = np.zeros(tokens, np.int64), np.where(is_global, 0, first)
    if causal:
        start, of_global = np.maximum(start, keys), (keys, of_global[1])
    return ranges_of((start, stop), of_global)


def documents(lengths: Any, key_lengths: Any = None) -> np.ndarray:
    """Returns packed documents, each of which sees itself: what ``seq_info`` says, as ranges.

    ``q sees k iff both are in one document``. ``seq_info`` runs on more kernels; as ranges, documents can be combined
    with others. ``causal`` and ``window`` then count in the whole row, which differs where a document has more queries
    than keys or fewer.

    Args:
        lengths: the tokens of each document: ints ``[documents]``.
        key_lengths: those of its keys, if they differ.

    Returns:
        int32 ``[1, 1, keys, 1, 2]``, for ``sum(lengths)`` queries.

    Raises:
        ShapeError, SpecError: for a negative length, or another number of key documents.
    """
    queries = check_lengths("lengths", lengths)
    keys = queries if key_lengths is None else check_lengths("key_lengths", key_lengths)
    if len(keys) != len(queries):
        raise ShapeError(f"key_lengths: expected as many documents as lengths ({len(queries)}), got {len(keys)}")
    ends = starts_of(queries)
    return ranges_of((np.repeat(ends[:-1], keys), np.repeat(ends[1:], keys)))
