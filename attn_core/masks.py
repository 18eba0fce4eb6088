"""Masks as ranges: constructors of the argument ``key_ranges`` for the masks that models use.

Each returns int32 numpy ``[batch or 1, kv_heads or 1, keys, ranges, 2]``: for each key the half-open ranges of queries
that see it, which ``attention(..., key_ranges=)`` of both frontends takes as it is. ``attn_core.call.key_ranges``
defines them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from attn_core.call.kinds import MOST, check_size, is_host_int
from attn_core.call.options import check_flag, normalise_window
from attn_core.errors import ShapeError, SpecError, shown

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


__all__ = [
    "block_diffusion",
    "blocks",
    "documents",
    "from_flashmask",
    "global_and_window",
    "prefix_lm",
    "shared_prefix",
    "tree",
]


def _check_length(name: str, value: int, least: int = 0, most: int = MOST) -> int:
    """Returns a number of tokens as an int, if it is from ``least`` to ``most``."""
    check_size(name, value, least, most)
    return int(value)


def _check_lengths(name: str, values: ArrayLike) -> np.ndarray:
    """Returns numbers of tokens as int64 ``[n]``."""
    array = _whole_numbers(name, values, (1,))
    if (array < 0).any():
        at = int(np.argmax(array < 0))
        raise ShapeError(f"{name}[{at}]={int(array[at])}: expected at least 0")
    return array


def _whole_numbers(name: str, values: ArrayLike | None, axes: tuple[int, ...]) -> np.ndarray:
    """Returns whole numbers as int64; ``axes`` are the numbers of axes that the array may have."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.size and array.dtype.kind not in "iu":
        raise SpecError(f"{name}={shown(values)}: expected whole numbers on the host")
    if array.ndim not in axes:
        raise ShapeError(f"{name}: expected {' or '.join(map(str, axes))} axes, got shape {list(array.shape)}")
    return array.astype(np.int64)


def _starts_of(lengths: np.ndarray) -> np.ndarray:
    """Returns where each part begins, and where the last one ends: int64 ``[n + 1]``."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def _ranges_of(*pairs: tuple[ArrayLike, ArrayLike]) -> np.ndarray:
    """Returns key ranges int32 ``[batch or 1, 1, keys, len(pairs), 2]`` from starts and stops ``[batch, keys]`` each.

    They broadcast. A range whose stop is not behind its start becomes ``(0, 0)``, the empty range.
    """
    arrays = np.broadcast_arrays(*(np.atleast_2d(np.asarray(end, np.int64)) for pair in pairs for end in pair))
    whole = np.stack(arrays, -1).reshape(*arrays[0].shape, len(pairs), 2)
    whole = np.where(whole[..., :1] < whole[..., 1:], whole, 0)
    if whole.size and whole.max() > np.iinfo(np.int32).max:
        raise ShapeError(f"lengths: expected at most {np.iinfo(np.int32).max} queries in a row, got {whole.max()}")
    return np.ascontiguousarray(whole[:, None], np.int32)


def from_flashmask(indices: ArrayLike, causal: bool) -> np.ndarray:
    """Returns FlashMask's ``startend_row_indices`` as key ranges; theirs say which queries do not see a key.

    With r the last axis: causal, 1: ``q sees k iff k <= q < r0``; causal, 2: ``k <= q, and not r0 <= q < r1``; not
    causal, 2: ``r1 <= q < r0``; not causal, 4: ``not r0 <= q < r1, and not r2 <= q < r3``. The ranges have causal in
    them, so call attention without it or with it.

    Args:
        indices: ints ``[batch or 1, kv_heads or 1, tokens, 1, 2 or 4]`` for as many queries as keys: the queries at
            which hiding starts and ends below the diagonal, then above it.
        causal: as in FlashMask.

    Returns:
        int32 ``[batch or 1, kv_heads or 1, tokens, 1 or 2, 2]``.

    Raises:
        ShapeError, SpecError: for another shape, for an index that is negative or beyond ``tokens``, and for a key
            whose queries form three ranges.
    """
    array, causal = np.asarray(indices), check_flag("causal", causal)
    expected = (1, 2) if causal else (2, 4)
    if array.ndim != 4 or array.shape[-1] not in expected:
        last = " or ".join(map(str, expected))
        raise ShapeError(
            f"indices: expected [batch or 1, kv_heads or 1, tokens, {last}] with causal={causal}, got "
            f"{list(array.shape)}"
        )
    if array.size and array.dtype.kind not in "iu":
        raise SpecError(f"indices: expected whole numbers, got dtype {array.dtype}")
    tokens = array.shape[2]
    if (wrong := (array < 0) | (array > tokens)).any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise SpecError(f"indices{list(at)}={array[at]}: expected a query from 0 to {tokens}, the number of tokens")
    ends = array.astype(np.int64)
    key = np.broadcast_to(np.arange(tokens), ends.shape[:3])
    end = np.full_like(key, tokens)
    if array.shape[-1] == 1:
        pairs = [(key, ends[..., 0])]
    elif causal:
        start, stop = ends[..., 0], np.maximum(ends[..., 0], ends[..., 1])
        pairs = [(key, start), (np.maximum(key, stop), end)]
    elif array.shape[-1] == 2:
        pairs = [(ends[..., 1], ends[..., 0])]
    else:
        pairs = _two_of_three(ends, end)
    whole = np.stack([np.stack(pair, -1) for pair in pairs], -2)
    return np.ascontiguousarray(np.where(whole[..., :1] < whole[..., 1:], whole, 0), np.int32)


def _two_of_three(ends: np.ndarray, end: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the queries outside two hidden ranges of each key, ``[batch, kv_heads, tokens, 4]``, as two ranges."""
    hidden = ends.reshape(*ends.shape[:-1], 2, 2)
    # An empty hidden range hides nothing; moved to the end, it leaves its neighbours whole.
    hidden = np.where(hidden[..., :1] < hidden[..., 1:], hidden, end[..., None, None])
    order = np.argsort(hidden[..., 0], -1, kind="stable")
    hidden = np.take_along_axis(hidden, order[..., None], -2)
    (first, first_stop), (second, second_stop) = ((hidden[..., at, 0], hidden[..., at, 1]) for at in (0, 1))
    last = np.maximum(first_stop, second_stop)
    three = [(np.zeros_like(end), first), (first_stop, second), (last, end)]
    present = np.stack([start < stop for start, stop in three], -1)
    if (present.sum(-1) > 2).any():
        row, head, key = np.argwhere(present.sum(-1) > 2)[0].tolist()
        raise SpecError(
            f"indices: expected at most 2 ranges of queries that see a key, got 3 for key {key} (batch row {row}, kv "
            f"head {head}); pass a mask"
        )
    # The ranges that are not empty come first, in their order.
    order = np.argsort(~present, -1, kind="stable")
    starts, stops = (np.take_along_axis(np.stack(side, -1), order, -1) for side in zip(*three, strict=True))
    return [(starts[..., at], stops[..., at]) for at in (0, 1)]


def prefix_lm(lengths: ArrayLike, tokens: int) -> np.ndarray:
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
    tokens = _check_length("tokens", tokens)
    if is_host_int(lengths):
        lengths = [lengths]
    prefix = _check_lengths("lengths", lengths)[:, None]
    if (prefix > tokens).any():
        raise ShapeError(f"lengths: expected at most tokens={tokens}, got {int(prefix.max())}")
    keys = np.arange(tokens)
    return _ranges_of((np.where(keys < prefix, 0, keys), tokens))


def blocks(starts: ArrayLike, bidirectional: ArrayLike, tokens: int) -> np.ndarray:
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
    tokens, first = _check_length("tokens", tokens), _check_lengths("starts", starts)
    if not len(first) or first[0] != 0 or (np.diff(first) <= 0).any() or (tokens and first[-1] >= tokens):
        raise SpecError(f"starts={shown(starts)}: expected ascending numbers from 0 to below tokens={tokens}")
    flags = np.asarray(bidirectional)
    if flags.dtype != bool or flags.shape not in ((), first.shape):
        wrong = f"bidirectional={shown(bidirectional)}"
        raise SpecError(f"{wrong}: expected a bool, or one for each of {len(first)} blocks")
    keys = np.arange(tokens)
    block = np.searchsorted(first, keys, side="right") - 1
    whole = np.broadcast_to(flags, first.shape)[block]
    return _ranges_of((np.where(whole, first[block], keys), tokens))


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
    tokens = _check_length("tokens", tokens)
    first = _check_length("global_tokens", global_tokens, most=tokens)
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
    return _ranges_of((start, stop), of_global)


def documents(lengths: ArrayLike, key_lengths: ArrayLike | None = None) -> np.ndarray:
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
    queries = _check_lengths("lengths", lengths)
    keys = queries if key_lengths is None else _check_lengths("key_lengths", key_lengths)
    if len(keys) != len(queries):
        raise ShapeError(f"key_lengths: expected as many documents as lengths ({len(queries)}), got {len(keys)}")
    ends = _starts_of(queries)
    return _ranges_of((np.repeat(ends[:-1], keys), np.repeat(ends[1:], keys)))


def shared_prefix(prefix: Any, completions: Any) -> np.ndarray:
    """Returns the mask of completions that share a prompt: each sees the prompt and itself, and no other completion.

    ``q sees k iff k <= q, and k is in the prompt of q's group or in q's own completion``. Call attention without
    ``causal`` or with it: the result is the same.

    Args:
        prefix: the tokens of the prompt; an int, or one for each of several groups, which follow each other in the row.
        completions: the tokens of each completion, ints; for several groups a list of them for each.

    Returns:
        int32 ``[1, 1, tokens, 1, 2]``, in the order prompt, its completions, next prompt.

    Raises:
        ShapeError, SpecError: for a negative length, or other numbers of prompts and groups.
    """
    one = is_host_int(prefix)
    prompts = _check_lengths("prefix", [prefix] if one else prefix)
    groups = [completions] if one else list(completions)
    if len(groups) != len(prompts):
        raise ShapeError(f"completions: expected a list for each of {len(prompts)} prompts, got {len(groups)}")
    stops = [np.zeros(0, np.int64)]
    begin = 0
    for prompt, group in zip(prompts.tolist(), groups, strict=True):
        lengths = _check_lengths("completions", group)
        ends = begin + prompt + np.cumsum(lengths)
        last = begin + prompt + int(lengths.sum())
        stops += [np.full(prompt, last), np.repeat(ends, lengths)]
        begin = last
    return _ranges_of((np.arange(begin), np.concatenate(stops)))


def tree(
    parents: ArrayLike | None = None, *, tin: ArrayLike | None = None, tout: ArrayLike | None = None
) -> np.ndarray:
    """Returns the mask of a tree of tokens in depth-first order: a query sees itself and its ancestors.

    ``q sees k iff tin[k] <= tin[q] < tout[k]``. With ``parents`` tin is the place in the row, and tout is the place
    behind the last descendant.

    Args:
        parents: the place of each token's parent, -1 for a root: ints ``[tokens]`` or ``[batch, tokens]``. The tokens
            below a token must follow it without others between them.
        tin, tout: instead of parents: numbers of each token's entry and exit, tin ascending along the row. Tokens of
            equal tin see each other; with ``causal`` they are one node whose tokens see the earlier ones.

    Returns:
        int32 ``[batch or 1, 1, tokens, 1, 2]``.

    Raises:
        ShapeError, SpecError: for parents that are not in depth-first order, tin that descends, or other shapes.
    """
    if (parents is None) == (tin is None and tout is None) or (tin is None) != (tout is None):
        raise SpecError("tree: expected parents, or tin and tout")
    if parents is not None:
        rows = np.atleast_2d(_whole_numbers("parents", parents, (1, 2)))
        stops = np.stack([_ends_of_subtrees(row) for row in rows])
        return _ranges_of((np.arange(rows.shape[1]), stops))
    enter, leave = (np.atleast_2d(_whole_numbers(name, x, (1, 2))) for name, x in (("tin", tin), ("tout", tout)))
    if enter.shape != leave.shape:
        raise ShapeError(f"tout: expected the shape of tin, {list(enter.shape)}, got {list(leave.shape)}")
    if (np.diff(enter) < 0).any():
        row, at = np.argwhere(np.diff(enter) < 0)[0].tolist()
        raise SpecError(
            f"tin: expected depth-first order, in which tin never descends; got {enter[row, at]} then "
            f"{enter[row, at + 1]} at token {at + 1}"
        )
    pairs = [(np.searchsorted(t, t), np.searchsorted(t, o)) for t, o in zip(enter, leave, strict=True)]
    return _ranges_of((np.stack([start for start, _ in pairs]), np.stack([stop for _, stop in pairs])))


def _ends_of_subtrees(parents: np.ndarray) -> np.ndarray:
    """Returns the place behind the last descendant of each token, int64 ``[tokens]``."""
    ends = np.zeros(len(parents), np.int64)
    path: list[int] = []  # the token before and its ancestors
    for token, parent in enumerate(parents.tolist()):
        while path and path[-1] != parent:
            ends[path.pop()] = token
        if not path and parent != -1:
            raise SpecError(
                f"parents[{token}]={parent}: expected depth-first order, in which a parent is -1, the token before or "
                "one of its ancestors"
            )
        path.append(token)
    ends[path] = len(parents)
    return ends


def block_diffusion(tokens: int, block: int) -> np.ndarray:
    """Returns the mask of training block diffusion: a row of the noisy tokens and then the same tokens clean.

    ``q sees k iff k is noisy: q is noisy and of its block; k is clean: q is noisy and of a later block, or clean and of
    its block or a later one``. Call attention without ``causal``.

    Args:
        tokens: of the noisy half, and of the clean half.
        block: tokens of a block; the last one may be shorter.

    Returns:
        int32 ``[1, 1, 2 * tokens, 2, 2]``.

    Raises:
        ShapeError: for a negative number of tokens, or a block without tokens.
    """
    tokens, block = _check_length("tokens", tokens), _check_length("block", block, 1)
    first = np.arange(tokens) // block * block
    behind = np.minimum(first + block, tokens)
    noisy = (first, behind), (np.zeros_like(first), np.zeros_like(first))
    clean = (behind, np.full_like(first, tokens)), (tokens + first, np.full_like(first, 2 * tokens))
    halves = zip(noisy, clean, strict=True)
    return _ranges_of(*(tuple(map(np.concatenate, zip(one, other, strict=True))) for one, other in halves))  # type: ignore[arg-type]
