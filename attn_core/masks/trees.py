"""Masks of branches in one row: shared prefixes, trees in depth-first order, block diffusion."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError
from attn_core.masks.values import check_length, check_lengths, ranges_of, whole_numbers


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
    prompts = check_lengths("prefix", [prefix] if one else prefix)
    groups = [completions] if one else list(completions)
    if len(groups) != len(prompts):
        raise ShapeError(f"completions: expected a list for each of {len(prompts)} prompts, got {len(groups)}")
    stops = [np.zeros(0, np.int64)]
    begin = 0
    for prompt, group in zip(prompts.tolist(), groups, strict=True):
        lengths = check_lengths("completions", group)
        ends = begin + prompt + np.cumsum(lengths)
        last = begin + prompt + int(lengths.sum())
        stops += [np.full(prompt, last), np.repeat(ends, lengths)]
        begin = last
    return ranges_of((np.arange(begin), np.concatenate(stops)))


def tree(parents: Any = None, *, tin: Any = None, tout: Any = None) -> np.ndarray:
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
        rows = np.atleast_2d(whole_numbers("parents", parents, (1, 2)))
        stops = np.stack([_ends_of_subtrees(row) for row in rows])
        return ranges_of((np.arange(rows.shape[1]), stops))
    enter, leave = (np.atleast_2d(whole_numbers(name, x, (1, 2))) for name, x in (("tin", tin), ("tout", tout)))
    if enter.shape != leave.shape:
        raise ShapeError(f"tout: expected the shape of tin, {list(enter.shape)}, got {list(leave.shape)}")
    if (np.diff(enter) < 0).any():
        row, at = np.argwhere(np.diff(enter) < 0)[0].tolist()
        raise SpecError(
            f"tin: expected depth-first order, in which tin never descends; got {enter[row, at]} then "
            f"{enter[row, at + 1]} at token {at + 1}"
        )
    pairs = [(np.searchsorted(t, t), np.searchsorted(t, o)) for t, o in zip(enter, leave, strict=True)]
    return ranges_of((np.stack([start for start, _ in pairs]), np.stack([stop for _, stop in pairs])))


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
    tokens, block = check_length("tokens", tokens), check_length("block", block, 1)
    first = np.arange(tokens) // block * block
    behind = np.minimum(first + block, tokens)
    noisy = (first, behind), (np.zeros_like(first), np.zeros_like(first))
    clean = (behind, np.full_like(first, tokens)), (tokens + first, np.full_like(first, 2 * tokens))
    halves = zip(noisy, clean, strict=True)
    return ranges_of(*(tuple(map(np.concatenate, zip(one, other, strict=True))) for one, other in halves))  # type: ignore[arg-type]
