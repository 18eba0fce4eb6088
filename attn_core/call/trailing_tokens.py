"""Tokens after the last offset of packed documents: they see no key, and no query sees them.

A batch that is padded to a fixed length has such tokens. Kernels leave rows outside of all documents unwritten. So the
tokens become extra documents: first queries without keys, then keys without queries. None is longer than the caller's
longest document, because a kernel's grid is sized for that. Every backend supports documents without keys.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError


class Tail(NamedTuple):
    """The extra documents for trailing tokens, by their ends.

    The last offset may be unknown before the kernel runs. So the ends assume the smallest possible last offset. For a
    larger one take ``max(end, last offset)``: some of the extra documents then have no token.

    Attributes:
        ends_q, ends_k: int32, of one length, ascending. The last are the token counts.
        max_len_q, max_len_k: the longest documents, including the extra ones.
        queries: the number of extra documents that may have queries; the others may have keys.
    """

    ends_q: np.ndarray
    ends_k: np.ndarray
    max_len_q: int
    max_len_k: int
    queries: int


@lru_cache(maxsize=1024)
def tail_of(
    tokens: tuple[int, int], longest: tuple[int, int], documents: int, last_offsets: tuple[int, int] | None = None
) -> Tail | None:
    """Returns the tail of offsets, or None if every token has a document.

    Args:
        tokens: the tokens of q and k. All pairs here are (q, k).
        longest: ``max_len_q`` and ``max_len_k``.
        documents: the number of documents. The tail has at most about twice as many, however small ``longest`` is.
        last_offsets: the last offsets; None where they are traced or on a device.
    """
    for name, count in zip("qk", tokens):
        if count > np.iinfo(np.int32).max:
            raise ShapeError(f"{name}: {count} tokens, more than int32 offsets can address ({np.iinfo(np.int32).max})")
    # Unknown offsets may end as early as 0, so the tail must be able to cover every token.
    firsts = last_offsets or (0, 0)
    # This is `longest`, unless the caller's documents could not cover the row even at that length.
    steps = [max(most, -(-(n - first) // (documents + 1))) for n, most, first in zip(tokens, longest, firsts)]
    q, k = (_ends(first, n, step) for first, n, step in zip(firsts, tokens, steps))
    if not q and not k:
        return None
    # Documents with keys have no query, so all their ends in q are the token count. Documents with queries have
    # no key, so all their ends in k are the last offset.
    ends_q = np.array(q + tokens[:1] * len(k), np.int32)
    ends_k = np.array(firsts[1:] * len(q) + k, np.int32)
    return Tail(ends_q, ends_k, steps[0] if q else longest[0], steps[1] if k else longest[1], len(q))


def _ends(first: int, tokens: int, step: int) -> tuple[int, ...]:
    """Returns the ends of documents of at most ``step`` tokens that cover the tokens from ``first`` on."""
    return tuple(reversed(range(tokens, first, -step))) if first < tokens else ()


def append_tail(offsets: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns the offsets with a tail appended."""
    # An end before the last offset would make the offsets decrease: it becomes a document without tokens.
    return np.concatenate((offsets, np.maximum(ends, offsets[-1])))


def cover_tail(info: SeqInfo, tokens: tuple[int, int]) -> SeqInfo:
    """Returns a SeqInfo of numpy arrays with documents for trailing tokens; unchanged if there are none."""
    last_offsets = (int(info.cu_seqlens_q[-1]), int(info.cu_seqlens_k[-1]))
    longest, documents = (info.max_len_q, info.max_len_k), len(info.cu_seqlens_q) - 1
    tail = tail_of(tokens, longest, documents, last_offsets)
    if tail is None:
        return info
    queries, keys = append_tail(info.cu_seqlens_q, tail.ends_q), append_tail(info.cu_seqlens_k, tail.ends_k)
    return SeqInfo.unchecked(queries, keys, tail.max_len_q, tail.max_len_k)
