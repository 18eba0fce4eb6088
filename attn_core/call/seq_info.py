"""Packed documents: several sequences laid end to end in one row, separated by cumulative lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attn_core.call.hints import remedy_of
from attn_core.call.offset_checks import check_cu_seqlens
from attn_core.errors import DTypeError, ShapeError, SpecError, shown


# Without __eq__, because comparing the offsets gives an array, or waits for the device.
@dataclass(frozen=True, eq=False)
class SeqInfo:
    """The start and end of each packed document.

    Attributes:
        cu_seqlens_q: int32 array of shape ``[documents + 1]``: document ``d`` holds query tokens
            ``cu_seqlens_q[d] : cu_seqlens_q[d + 1]``. Empty documents are allowed. A torch or JAX array is not copied;
            a numpy array is, because its owner may write the next batch into it before a backward runs.
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

    def converted(self, place: Any, convert: Callable[[SeqInfo], Any]) -> Any:
        """Returns ``convert(self)``, cached per place (e.g. a device).

        Only for arrays that cannot change: a frontend uses it for numpy arrays, which are private copies.
        """
        if place not in self._converted:
            self._converted[place] = convert(self)
        return self._converted[place]

    def known_conversion(self, place: Any) -> Any:
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
                    raise DTypeError(
                        f"seq_info.cu_seqlens_{side}: expected dtype int32, got {cu_seqlens.dtype}; "
                        "convert it with .astype('int32')"
                    )
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

    @classmethod
    def from_lengths(
        cls,
        lengths_q: Iterable[int],
        lengths_k: Iterable[int] | None = None,
        *,
        array: Callable[[np.ndarray], Any] | None = None,
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
    def unchecked(cls, cu_seqlens_q: Any, cu_seqlens_k: Any, max_len_q: Any, max_len_k: Any) -> SeqInfo:
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
    def coerce(cls, value: Any) -> SeqInfo | None:
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


def _refuse_lengths(value: Any) -> None:
    """Raises SpecError for a list or tuple of ints, which are lengths of documents by mistake, never the triple."""
    if isinstance(value, (tuple, list)) and value and all(is_host_int(item) for item in value):
        shown = str(list(map(int, value[:6])))[:-1] + (", ...]" if len(value) > 6 else "]")
        raise SpecError(
            f"seq_info: expected a SeqInfo, got {shown}; lengths of documents are SeqInfo.from_lengths({shown})"
        )


def is_host_int(value: Any) -> bool:
    """Returns whether a value is an integer on the host: an int, numpy's int, or a tracer's symbol. No tensor is."""
    if isinstance(value, (int, np.integer)):  # first, because Dynamo cannot look up attributes of a symbol
        return not isinstance(value, bool)
    # A class has the method of its objects.
    return hasattr(value, "__index__") and not isinstance(value, type) and not _has_shape(value)


def must_be_static(value: Any) -> str:
    """Returns what to do about an array or a tracer in the place of a static option; empty for other values."""
    if not _has_shape(value) or isinstance(value, np.generic):
        return ""
    return "; it must be static: under jit close over it or name it in static_argnames, elsewhere pass a Python value"


def _has_shape(value: Any) -> bool:
    try:
        return hasattr(value, "shape")
    except (RuntimeError, ValueError):  # a tensor whose shape is not known yet
        return True


def is_number(size: Any) -> bool:
    """Returns whether a size is a number. Comparing a symbolic size with a number can raise in its framework."""
    return isinstance(size, (int, np.integer))


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
    if total > np.iinfo(np.int32).max:
        raise SpecError(
            f"{name}: {total} tokens in all, more than int32 offsets can address ({np.iinfo(np.int32).max})"
        )
    return np.concatenate([[0], np.cumsum([int(length) for length in items])]).astype(np.int32)


def _is_length(length: Any) -> bool:
    if isinstance(length, bool):
        return False
    try:  # by __index__, which an array of several numbers has and refuses
        return operator.index(length) >= 0
    except (TypeError, ValueError, RuntimeError):
        return False


def _longest(queries: np.ndarray, keys: np.ndarray, max_len: Any) -> tuple[int, int]:
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


def _with_documents(offsets: np.ndarray, count: Any) -> np.ndarray:
    """Appends documents without tokens until there are ``count`` documents."""
    missing = count - (len(offsets) - 1) if is_host_int(count) else -1
    if missing < 0:
        raise SpecError(f"max_documents={shown(count)}: expected a host int, at least the {len(offsets) - 1} documents")
    if count > np.iinfo(np.int32).max:
        raise SpecError(f"max_documents={shown(count)}: expected at most {np.iinfo(np.int32).max}, the largest int32")
    return np.pad(offsets, (0, int(missing)), "edge")
