"""Packed documents: several sequences laid end to end in one row, separated by cumulative lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attn_core.call.hints import remedy_of
from attn_core.call.kinds import MOST, is_host_int, must_be_static
from attn_core.errors import DTypeError, ShapeError, SpecError, shown

T = TypeVar("T")


# Without __eq__, because comparing the offsets gives an array, or waits for the device.
@dataclass(frozen=True, eq=False)
class SeqInfo:
    """The start and end of each packed document.

    Attributes:
        cu_seqlens_q: int32 array of shape ``[documents + 1]``: document ``d`` holds query tokens
            ``cu_seqlens_q[d] : cu_seqlens_q[d + 1]``. Empty documents are allowed. A torch or JAX array is not copied;
            a numpy array is, because its owner may write the next batch into it before a backward runs. One of int64
            becomes int32.
        cu_seqlens_k: the same for key/value tokens; the documents pair up by position.
        max_len_q: host int, at least the longest query document (units: tokens).
        max_len_k: host int, at least the longest key document.

    Raises:
        DTypeError, ShapeError, SpecError: if the metadata, or the values of numpy arrays, do not describe documents.
            The frontends also check the values of torch and JAX arrays that are on the host.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_len_q: int
    max_len_k: int
    _converted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def converted(self, place: Hashable, convert: Callable[[SeqInfo], T]) -> T:
        """Returns ``convert(self)``, cached per place (e.g. a device).

        Only for arrays that cannot change: a frontend uses it for numpy arrays, which are private copies.
        """
        if place not in self._converted:
            self._converted[place] = convert(self)
        return self._converted[place]

    def known_conversion(self, place: Hashable) -> Any:
        """Returns what ``converted`` cached for a place, or None."""
        return self._converted.get(place)

    def __post_init__(self) -> None:
        for name in ("max_len_q", "max_len_k"):
            value = getattr(self, name)
            if not is_host_int(value):
                raise SpecError(
                    f"seq_info.{name}={shown(value)}: expected a host int (the longest document in tokens), because a "
                    f"value on a device would cost a synchronisation on every call{must_be_static(value)}"
                )
            if value < 0:
                raise SpecError(f"seq_info.{name}={value}: expected the longest document in tokens, 0 or more")
            if isinstance(value, np.integer):
                object.__setattr__(self, name, int(value))
        self._copy_numpy()
        for side in ("q", "k"):
            cu_seqlens = getattr(self, f"cu_seqlens_{side}")
            if isinstance(cu_seqlens, np.ndarray):
                if cu_seqlens.dtype != np.int32:
                    cu_seqlens = self._narrow(side, cu_seqlens)
                check_cu_seqlens(cu_seqlens, getattr(self, f"max_len_{side}"), side=side)

    def _copy_numpy(self) -> None:
        """Replaces numpy offsets by copies. One array for both sides stays one, so that it is converted once."""
        callers_q, callers_k = self.cu_seqlens_q, self.cu_seqlens_k
        for name, offsets in (("cu_seqlens_q", callers_q), ("cu_seqlens_k", callers_k)):
            if isinstance(offsets, np.ma.MaskedArray):
                raise SpecError(f"seq_info.{name}: expected an array without a mask, got a numpy.ma.MaskedArray")
        if isinstance(callers_q, np.ndarray):
            object.__setattr__(self, "cu_seqlens_q", callers_q.copy())
        if isinstance(callers_k, np.ndarray):
            object.__setattr__(self, "cu_seqlens_k", self.cu_seqlens_q if callers_k is callers_q else callers_k.copy())

    def _narrow(self, side: str, offsets: np.ndarray) -> np.ndarray:
        """Replaces int64 offsets, of both sides if they share them, by int32 ones, and returns these."""
        name = f"seq_info.cu_seqlens_{side}"
        if offsets.dtype != np.int64:
            raise DTypeError(f"{name}: expected dtype int32, got {offsets.dtype}; convert it with .astype('int32')")
        narrow = offsets.astype(np.int32)
        if (wrapped := narrow != offsets).any():
            raise SpecError(f"{name}: expected offsets of at most {MOST}, the largest int32, got {offsets[wrapped][0]}")
        for field_name in ("cu_seqlens_q", "cu_seqlens_k"):
            if getattr(self, field_name) is offsets:
                object.__setattr__(self, field_name, narrow)
        return narrow

    @classmethod
    def from_lengths(
        cls,
        lengths_q: Iterable[int],
        lengths_k: Iterable[int] | None = None,
        *,
        array: Callable[[np.ndarray], object] | None = None,
        max_len: int | tuple[int, int] | None = None,
        max_documents: int | None = None,
    ) -> SeqInfo:
        """Builds a SeqInfo from document lengths (host ints, tokens).

        The longest document and the number of documents are part of what a program is compiled for. Both limits make
        them the same for every batch, so that ``jax.jit`` and ``torch.compile`` compile one program.

        Args:
            lengths_q: query tokens of each document; zeros are allowed.
            lengths_k: key tokens of each document; the same as ``lengths_q`` when omitted (self-attention).
            array: turns the int32 numpy offsets into the array the caller wants to hold, for example
                ``torch.from_numpy`` or ``jnp.asarray``; numpy when omitted.
            max_len: at least the longest document of any batch, or a pair for queries and keys; the longest of these
                lengths when omitted.
            max_documents: at least the number of documents in any batch. Empty documents are appended until there are
                this many; none are if omitted.
        """
        queries = _offsets(lengths_q, "lengths_q")
        keys = queries if lengths_k is None else _offsets(lengths_k, "lengths_k")
        if len(queries) != len(keys):
            raise ShapeError(
                f"lengths_k: expected one length for each of the {len(queries) - 1} query documents, "
                f"got {len(keys) - 1}"
            )
        max_len_q, max_len_k = _longest(queries, keys, max_len)
        if max_documents is not None:
            same = keys is queries
            queries = _with_documents(queries, max_documents)
            keys = queries if same else _with_documents(keys, max_documents)
        if array is not None and not callable(array):
            raise SpecError(f"array: expected a function of a numpy array, got {type(array).__name__}")
        if array is None:
            return cls(queries, keys, max_len_q, max_len_k)
        # One array for both sides if they are equal, so that a device gets one copy.
        offsets = array(queries)
        return cls(offsets, offsets if keys is queries else array(keys), max_len_q, max_len_k)

    @classmethod
    def unchecked(cls, cu_seqlens_q: object, cu_seqlens_k: object, max_len_q: object, max_len_k: object) -> SeqInfo:
        """Builds a SeqInfo without checks, for frameworks that rebuild trees from placeholders instead of arrays."""
        # Not by __init__, whose checks refuse placeholders.
        info = object.__new__(cls)
        values = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_len_q": max_len_q,
            "max_len_k": max_len_k,
        }
        for name, value in {**values, "_converted": {}}.items():
            object.__setattr__(info, name, value)
        return info

    @classmethod
    def coerce(cls, value: object) -> SeqInfo | None:
        """Returns a SeqInfo from one, or from the triple ``(seq_lens, cu_seqlens, max_seqlen)`` of self-attention.

        Returns None for None. Raises SpecError for anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, (tuple, list)) and len(value) == 3:
            seq_lens, cu_seqlens, max_seqlen = value
            if isinstance(cu_seqlens, (int, np.integer)):
                _refuse_lengths(value)
            # Only numpy offsets are compared: reading offsets on a device would wait for it.
            lengths = np.diff(cu_seqlens).tolist() if isinstance(cu_seqlens, np.ndarray) else None
            if lengths is not None and isinstance(seq_lens, (list, tuple, np.ndarray)) and list(seq_lens) != lengths:
                raise SpecError(f"seq_info: expected seq_lens {lengths}, the steps of cu_seqlens, got {list(seq_lens)}")
            return cls(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
        _refuse_lengths(value)
        raise SpecError(
            f"seq_info: expected a SeqInfo or the triple (seq_lens, cu_seqlens, max_seqlen), got "
            f"{type(value).__name__}; {remedy_of(value) or 'build one with SeqInfo.from_lengths([...])'}"
        )


SeqInfoLike = SeqInfo | tuple[object, object, int] | None
"""The argument ``seq_info``: documents, or the triple ``(seq_lens, cu_seqlens, max_seqlen)``."""


def _refuse_lengths(value: object) -> None:
    """Raises SpecError for a list or tuple of ints, which are lengths of documents by mistake, never the triple."""
    if isinstance(value, (tuple, list)) and value and all(is_host_int(item) for item in value):
        shown = str(list(map(int, value[:6])))[:-1] + (", ...]" if len(value) > 6 else "]")
        raise SpecError(
            f"seq_info: expected a SeqInfo, got {shown}; lengths of documents are SeqInfo.from_lengths({shown})"
        )


def _offsets(lengths: Iterable[int], name: str) -> np.ndarray:
    """Returns int32 offsets ``[documents + 1]``. Raises SpecError or ShapeError, naming ``name``."""
    try:
        items = list(lengths)
    except (TypeError, RuntimeError, NotImplementedError):  # no iterable, an array without axes, or a sparse one
        raise SpecError(f"{name}: expected document lengths as a list of ints, got {type(lengths).__name__}") from None
    for length in items:
        if not _is_length(length):
            raise SpecError(f"{name}: expected lengths as non-negative ints, got {length!r}{must_be_static(length)}")
    if not items:
        raise ShapeError(f"{name}: expected at least one document, got none")
    # Python's ints do not wrap, so the comparison with the limit is exact.
    total = sum(int(length) for length in items)
    if total > MOST:
        raise SpecError(f"{name}: {total} tokens in all, more than int32 offsets can address ({MOST})")
    return np.concatenate([[0], np.cumsum([int(length) for length in items])]).astype(np.int32)


def _is_length(length: Any) -> bool:
    if isinstance(length, bool):
        return False
    try:  # by __index__, which an array of several numbers has and refuses
        return operator.index(length) >= 0
    except (TypeError, ValueError, RuntimeError):
        return False


def _longest(queries: np.ndarray, keys: np.ndarray, max_len: int | tuple[int, int] | None) -> tuple[int, int]:
    """Returns the longest documents of queries and keys, or the caller's limits, which may be one number for both."""
    longest = tuple(int(np.diff(offsets).max(initial=0)) for offsets in (queries, keys))
    if max_len is None:
        return longest[0], longest[1]
    limits = tuple(max_len) if isinstance(max_len, (tuple, list)) else (max_len, max_len)
    if len(limits) != 2 or not all(map(is_host_int, limits)):
        raise SpecError(f"max_len={shown(max_len)}: expected a host int, or a pair of them for queries and keys")
    for side, limit, needed in zip("qk", limits, longest, strict=True):
        if limit < needed:
            raise SpecError(
                f"max_len={shown(max_len)}: expected at least the longest of lengths_{side}, {needed} tokens"
            )
    return int(limits[0]), int(limits[1])


def _with_documents(offsets: np.ndarray, count: int) -> np.ndarray:
    """Appends documents without tokens until there are ``count`` documents."""
    missing = count - (len(offsets) - 1) if is_host_int(count) else -1
    if missing < 0:
        raise SpecError(f"max_documents={shown(count)}: expected a host int, at least the {len(offsets) - 1} documents")
    if count > MOST:
        raise SpecError(f"max_documents={shown(count)}: expected at most {MOST}, the largest int32")
    return np.pad(offsets, (0, int(missing)), "edge")


FEW_OFFSETS = 128
"""Up to this many offsets are checked as Python's ints, because each of numpy's functions takes a microsecond."""


def check_cu_seqlens(cu_seqlens: np.ndarray, max_len: int, *, side: str, tokens: int | None = None) -> None:
    """Checks offsets whose values are on the host, against the token count when it is known.

    Raises:
        ShapeError, SpecError: naming the first thing wrong with ``cu_seqlens_q`` or ``cu_seqlens_k``.
    """
    name = f"seq_info.cu_seqlens_{side}"
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ShapeError(
            f"{name}: expected shape [documents + 1] with at least one document, got {list(cu_seqlens.shape)}"
        )
    if len(cu_seqlens) <= FEW_OFFSETS and _are_valid(cu_seqlens.tolist(), max_len, tokens):
        return
    if cu_seqlens[0] != 0:
        raise SpecError(f"{name}: expected to start at 0, got {int(cu_seqlens[0])}; prepend the zero")
    # In int64, because the difference of two int32 offsets may wrap, and a decrease then looks like growth.
    lengths = np.diff(cu_seqlens.astype(np.int64))
    if (lengths < 0).any():
        at = int(np.argmax(lengths < 0))
        raise SpecError(
            f"{name}: expected non-decreasing offsets, got {int(cu_seqlens[at])} then {int(cu_seqlens[at + 1])} "
            f"at position {at + 1}; pass cumulative lengths, not lengths"
        )
    if tokens is not None and cu_seqlens[-1] > tokens:
        raise SpecError(
            f"{name}: expected to end at the token count {tokens} or before it, got {int(cu_seqlens[-1])}; "
            f"{_why_too_many(lengths, tokens)}"
        )
    if lengths.max(initial=0) > max_len:
        raise SpecError(
            f"seq_info.max_len_{side}={max_len}: expected at least the longest document, {int(lengths.max())} tokens"
        )


def _why_too_many(lengths: np.ndarray, tokens: int) -> str:
    """Returns what may be wrong with documents that have more tokens than their row."""
    if len(lengths) > 1 and lengths[0] == 0 and lengths[-1] <= tokens and (np.diff(lengths) >= 0).all():
        return "the lengths start with 0 and never decrease, so they look like offsets: pass np.diff of them"
    return "the row may be longer than its documents (padding at the end), but not shorter"


def _are_valid(ends: list[int], max_len: int, tokens: int | None) -> bool:
    fits = tokens is None or ends[-1] <= tokens
    lengths = [stop - start for start, stop in pairwise(ends)]
    return ends[0] == 0 and fits and min(lengths) >= 0 and max(lengths) <= max_len


class Tail(NamedTuple):
    """The extra documents for tokens after the last offset, by their ends. These see no key, and no query sees them.

    A batch that is padded to a fixed length has such tokens. Kernels leave rows outside of all documents unwritten. So
    the tokens become extra documents: first queries without keys, then keys without queries. None is longer than the
    caller's longest document, because a kernel's grid is sized for that. Every backend supports documents without keys.

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
        if count > MOST:
            raise ShapeError(f"{name}: {count} tokens, more than int32 offsets can address ({MOST})")
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
