"""Tokens behind the last offset of packed documents: they belong to nobody, so they see no key and no query sees them.

A batch that is padded to a fixed length has them. Kernels know documents and nothing else, and leave rows outside of
every document unwritten. So such tokens become documents: first queries without keys, then keys without queries, none
longer than the caller's longest, for a kernel's grid is made for that. Every backend has documents without keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from attn_core.call.seq_info import SeqInfo


class Tail(NamedTuple):
    """What follows the offsets of a call: the ends of the documents that hold nobody's tokens.

    The last offset may be unknown before the kernel runs. So the ends fit the earliest offset that it can be. For a
    later one take ``max(end, last offset)``: some documents then have no token.

    Attributes:
        ends_q, ends_k: int32, of one length, ascending. The last are the token counts.
        max_len_q, max_len_k: the longest documents, those of nobody's tokens included.
        queries: how many of the documents may have queries; the others may have keys.
    """

    ends_q: np.ndarray
    ends_k: np.ndarray
    max_len_q: int
    max_len_k: int
    queries: int


@lru_cache(maxsize=1024)
def tail_of(
    tokens: tuple[int, int], longest: tuple[int, int], documents: int, ended: tuple[int, int] | None = None
) -> Tail | None:
    """The tail of offsets; None where every token has a document.

    Args:
        tokens: how many q and k have. All pairs here are for q and for k.
        longest: ``max_len_q`` and ``max_len_k``.
        documents: how many the offsets have. The tail has at most about twice as many, however small ``longest`` is.
        ended: the last offsets; None where they are traced or on a device.
    """
    firsts = ended or (0, 0)
    # Where documents of `longest` tokens could hold the row at all, this is `longest`.
    steps = [max(most, -(-(n - first) // (documents + 1))) for n, most, first in zip(tokens, longest, firsts)]
    q, k = (_ends(first, n, step) for first, n, step in zip(firsts, tokens, steps))
    if not q and not k:
        return None
    ends_q = np.array(q + tokens[:1] * len(k), np.int32)
    ends_k = np.array(firsts[1:] * len(q) + k, np.int32)
    return Tail(ends_q, ends_k, steps[0] if q else longest[0], steps[1] if k else longest[1], len(q))


def _ends(first: int, tokens: int, step: int) -> tuple[int, ...]:
    """Where documents of at most ``step`` tokens end, from ``first`` or any later place on; the last at the end."""
    return tuple(reversed(range(tokens, first, -step))) if first < tokens else ()


def followed(offsets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The offsets with a tail behind them."""
    return np.concatenate((offsets, np.maximum(ends, offsets[-1])))


def completed(info: SeqInfo, tokens: tuple[int, int]) -> SeqInfo:
    """A SeqInfo of numpy arrays with documents for nobody's tokens; the same if there are none, or too few tokens."""
    ended = (int(info.cu_seqlens_q[-1]), int(info.cu_seqlens_k[-1]))
    longest, documents = (info.max_len_q, info.max_len_k), len(info.cu_seqlens_q) - 1
    tail = tail_of(tokens, longest, documents, ended)
    if tail is None:
        return info
    queries, keys = followed(info.cu_seqlens_q, tail.ends_q), followed(info.cu_seqlens_k, tail.ends_k)
    return SeqInfo.unchecked(queries, keys, tail.max_len_q, tail.max_len_k)
