"""One step over packed documents as plain data: what both frameworks are asked to do, in numpy.

Several conversations lie end to end in one row. The keys and values they have produced so far lie end to end in a
packed cache of fixed capacity, so that every decoding step has the same shapes (XLA compiles it once). The unused end
of the cache is one more document, which has keys and no queries: nothing ever looks at it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attn_core import SeqInfo


@dataclass(frozen=True, eq=False)
class PackedStep:
    """The new tokens of every document, and where their keys go.

    Attributes:
        tokens: int32 ``[tokens]``: the new tokens of all documents, end to end.
        positions: int32 ``[tokens]``: the place of each within its own document, which is what RoPE rotates by.
        source: int32 ``[capacity]``: the row of ``concatenate([cache, new])`` that each slot of the cache holds next.
        lengths_q: new tokens of each document, then 0 for the unused end.
        lengths_k: all tokens of each document so far, then the slots that are left.
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
        """The documents' bounds: queries are the new tokens, keys the whole cache."""
        return SeqInfo.from_lengths(self.lengths_q, self.lengths_k, array=array)


def pack(cached: Sequence[int], new: Sequence[Sequence[int]], capacity: int) -> PackedStep:
    """Plans a step: ``cached[d]`` tokens of document ``d`` are in the cache and ``new[d]`` (token ids) join it.

    Prefill is the step with nothing cached; decoding is the step with one new token each.

    Raises:
        ValueError: when the documents outgrow the capacity.
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
    rows.append(np.zeros(unused, np.int64))  # any row will do: the unused end is never looked at
    return PackedStep(
        tokens=np.concatenate([np.asarray(tokens, np.int32) for tokens in new]),
        positions=np.concatenate([n + np.arange(m) for n, m in zip(cached, lengths_q, strict=True)]).astype(np.int32),
        source=np.concatenate(rows).astype(np.int32),
        lengths_q=(*lengths_q, 0),
        lengths_k=(*lengths_k, unused),
    )


def _starts(lengths: Sequence[int]) -> np.ndarray:
    """Where each document begins when they lie end to end, ``[documents]``."""
    return np.cumsum([0, *lengths[:-1]])
