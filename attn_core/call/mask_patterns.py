"""Finds masks and biases that say no more than causal, window or documents do, and that every call passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.log import place
from attn_core.call.slow_paths import warn_once

MOST_ELEMENTS = 2**24
"""The most elements that are looked at."""


def look(name: str, table: np.ndarray) -> None:
    """Warns if a mask or bias ``[batch or 1, heads or 1, q_len, kv_len]`` on the host could be an option.

    Args:
        name: "mask", True is visible, or "bias", added.
    """
    if table.ndim < 2 or 1 in table.shape[-2:] or not 0 < table.size <= MOST_ELEMENTS:
        return
    visible = table if name == "mask" else _visible(table)
    option = None if visible is None else option_of(visible)
    if option is not None:
        finding = f"{name}: every call reads a table of {table.size} values that says the same as {option}"
        warn_once("mask", place(), finding, f"pass {option} instead of {name}=, which skips the hidden keys")


def _visible(bias: np.ndarray) -> np.ndarray | None:
    """Returns what a bias of zeros and of very low numbers shows; None for any other bias."""
    visible: Any = bias == 0
    hidden = bias <= np.float32(-1e4)
    return visible if (visible | hidden).all() else None


def option_of(visible: np.ndarray) -> str | None:
    """Returns the options that show the same keys as a mask ``[..., q_len, kv_len]``, as code; None if none do.

    A mask that hides nothing has none: it may be another one in the next call.
    """
    table = visible.reshape(-1, *visible.shape[-2:])
    first = table[0]
    if not first.any() or first.all() or not (table == first).all():
        return None
    return _band(first) or _documents(first)


def _band(table: np.ndarray) -> str | None:
    """Returns causal and window as code if the visible distances of a table ``[q_len, kv_len]`` are one range."""
    queries, keys = table.shape
    distance = np.arange(keys) - np.arange(queries)[:, None]
    low, high = int(distance[table].min()), int(distance[table].max())
    if not (table == ((distance >= low) & (distance <= high))).all():
        return None
    end = keys - queries  # the diagonal of bottom_right
    ahead, behind = high < keys - 1, low > 1 - queries  # whether each side hides a key
    if ahead and high in (end, 0):
        offset = end if high == end else 0
        words = ["causal=True", *([] if offset == end else ['alignment="top_left"'])]
        return ", ".join([*words, *([f"window={offset - low + 1}"] if behind else [])])
    left, right = end - low if behind else None, high - end if ahead else None
    # Both sides count from the diagonal, which a window always contains.
    return None if min(left or 0, right or 0) < 0 else f"window=({left}, {right})"


def _documents(table: np.ndarray) -> str | None:
    """Returns documents as code if a square table shows blocks along the diagonal, whole or causal ones."""
    if table.shape[0] != table.shape[1] or not table.diagonal().all():
        return None
    starts = table.argmax(1)  # the first key that each query sees
    same = starts[:, None] == starts
    causal = np.tril(np.ones_like(same))
    for seen, word in ((same, ""), (same & causal, ", causal=True")):
        if (table == seen).all():
            lengths = np.unique(starts, return_counts=True)[1].tolist()
            text = ", ".join(map(str, lengths[:4])) + (", ..." if len(lengths) > 4 else "")
            return f"seq_info=SeqInfo.from_lengths([{text}]){word}"
    return None
