"""A step over packed documents as plain data in numpy, for both frameworks.

Several conversations are end to end in one row. Their keys and values so far are end to end in a packed cache of fixed
capacity, so every decoding step has the same shapes, and XLA compiles it once. The unused end of the cache is one more
document. It has keys but no queries, so no query sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_core import SeqInfo


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The new tokens of every document, and the places of their keys.

    Attributes:
        tokens: int32 ``[tokens]``: the new tokens of all documents, end to end.
        positions: int32 ``[tokens]``: the position of each token in its document, for RoPE.
        source: int32 ``[capacity]``: the row of ``concatenate([cache, new])`` for each slot of the next cache.
        lengths_q: new tokens of each document, then 0 for the unused end.
        lengths_k: all tokens of each document so far, then the unused slots.
    """

    tokens: np.ndarray
    positions: np.ndarray
    source: np.ndarray
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    @property
    def last(self) -> np.ndarray:
        """The row of each document's newest token, ``[documents]``."""
        return np.cumsum(self.lengths_q[:-1]) - 1

    def seq_info(self, array: Callable[[np.ndarray], Any] | None = None) -> SeqInfo:
        """Returns the offsets of the documents: queries are the new tokens, keys the whole cache."""
        return SeqInfo.from_lengths(self.lengths_q, self.lengths_k, array=array)


def pack(cached: Sequence[int], new: Sequence[Sequence[int]], capacity: int) -> PackedStep:
    """Plans a step: ``cached[d]`` tokens of document ``d`` are in the cache and ``new[d]`` (token ids) join it.

    In prefill, nothing is cached; in decoding, each document has one new token.

    Raises:
        ValueError: if the documents exceed the capacity.
    """
    lengths_q = [len(tokens) for tokens in new]
    lengths_k = [old + fresh for old, fresh in zip(cached, lengths_q, strict=True)]
    unused = capacity - sum(lengths_k)
    if unused < 0:
        raise ValueError(f"the documents hold {sum(lengths_k)} tokens, more than the capacity of {capacity}")
    old_starts, new_starts = _starts(cached), _starts(lengths_q) + capacity
    rows = []
    for document, (old, fresh) in enumerate(zip(cached, lengths_q, strict=True)):
        rows += [old_starts[document] + np.arange(old), new_starts[document] + np.arange(fresh)]
    rows.append(np.zeros(unused, np.int64))  # any row will do, because no query sees the unused end
    return PackedStep(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in new]),
        positions=np.concatenate([n + np.arange(m) for n, m in zip(cached, lengths_q, strict=True)]).astype(np.int32),
        source=np.concatenate(rows).astype(np.int32),
        lengths_q=(*lengths_q, 0),
        lengths_k=(*lengths_k, unused),
    )


def _starts(lengths: Sequence[int]) -> np.ndarray:
    """Returns the first token of each document in the packed row, ``[documents]``."""
    return np.cumsum([0, *lengths[:-1]])
