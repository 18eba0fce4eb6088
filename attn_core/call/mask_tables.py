"""Masks as tables of pairs of queries and keys: what a table says in fewer numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Reach(NamedTuple):
    """The distances j - i at which query i sees key j: from ``low`` to ``high``, inclusive; None is unbounded."""

    low: int | None
    high: int | None


def reach_of_table(table: np.ndarray) -> Reach | None:
    """Returns the distances at which a table shows all of its pairs and no other; None if there are none."""
    if not table.any():
        return None
    queries, keys = (np.arange(length, dtype=np.int32) for length in table.shape)
    distance = keys - queries[:, None]
    low, high = int(distance[table].min()), int(distance[table].max())
    return Reach(low, high) if (table == ((distance >= low) & (distance <= high))).all() else None


def one_range(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Returns key ranges int32 ``[1, 1, kv_len, 1, 2]``; a range whose stop is not behind its start is empty."""
    both = np.stack([starts, stops], -1)
    both = np.where(starts[:, None] < stops[:, None], both, 0)
    return np.ascontiguousarray(both[None, None, :, None], np.int32)


def ranges_of_table(table: np.ndarray) -> np.ndarray | None:
    """Returns key ranges of a table with at most two runs of queries for each key; None for another table."""
    edges = np.diff(np.pad(table, ((1, 1), (0, 0))).astype(np.int8), axis=0).T  # [kv_len, q_len + 1]: +1 starts a run
    counts = (edges == 1).sum(1)
    if (most := int(counts.max(initial=0))) > 2:
        return None
    ranges = np.zeros((table.shape[1], max(most, 1), 2), np.int32)
    for side, step in enumerate((1, -1)):
        keys, queries = np.nonzero(edges == step)  # by key, then by query
        which = np.arange(len(keys)) - np.searchsorted(keys, keys)
        ranges[keys, which, side] = queries
    return ranges[None, None]
