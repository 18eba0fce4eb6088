"""The keys of each row in a dense cache, as data: the arguments kv_lengths, kv_starts and cache_index.

Row b of a call sees, of a cache ``[cache_batch, kv_len, kv_heads, dim]``, at most the keys
``k[cache_index[b], kv_starts[b] : kv_lengths[b]]``. The bottom-right diagonal of causal, window and ALiBi ends at
``kv_lengths[b]``: query i of n stands at key ``i + kv_lengths[b] - n``, as with flash-attn's ``cache_seqlens``. The
top-left diagonal begins at key 0 of the cache's row. Keys outside of a row may hold anything: they reach no result, and
their gradients are 0.

A call takes one of three forms, because no kernel that splits the keys of few queries has a backward, and because
kernels for many queries are faster where a row of the cache is no page:

- pages: a cache is a pool that has one page of kv_len tokens for each of its rows, and cache_index is the table.
- packed documents: the cache end to end is one row, in which the keys of each row of the call are a document. What lies
  between them are documents without queries. ``selection.dense_caches.form_of`` says which calls take which form.
- key ranges: one range of queries for each key says all of it, causal and window included. Mask, bias, dropout and
  functions combine with it, and it has gradients. Keys and values outside of a row are set to 0 before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.key_ranges import check_shape
from attn_core.call.kinds import check_int32, check_within, is_number
from attn_core.call.masks import FAR
from attn_core.call.options import ON_PAGES, Door, Options, check_options
from attn_core.call.options import OPTIONS as ALL
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import A, Array, Inputs
from attn_core.errors import ShapeError, SpecError
from attn_core.expressions.symbols import Array as SymbolicArray
from attn_core.expressions.symbols import Symbol
from attn_core.expressions.tracing import Aux, trace_score
from attn_core.expressions.tree import Expression


class CacheRows(NamedTuple):
    """Which keys belong to each row; int32 ``[batch]`` each, or None: the whole length, from 0, the row of q."""

    kv_lengths: Any = None
    kv_starts: Any = None
    cache_index: Any = None

    @property
    def first(self) -> str:
        """The name of the first array that the call has, for errors."""
        return next(name for name, array in zip(self._fields, self) if array is not None)


EXCLUDED = {
    "seq_info": "packed documents have lengths of their own",
    "q_segment_ids": "ids and positions count whole rows; mask= says which keys of the cache a query sees",
    "kv_segment_ids": "ids and positions count whole rows; mask= says which keys of the cache a query sees",
    "q_positions": "the lengths say where each row's diagonal lies",
    "kv_positions": "the lengths say where each row's diagonal lies",
}
"""The arguments of a call that the three exclude, and why."""


_OTHERS = ("layout", *CacheRows._fields, *(name for name in EXCLUDED if name != "seq_info"))
OPTIONS = {each.name: each.default for each in ALL if Door.ATTENTION in each.doors and each.name not in _OTHERS}
"""The options that ``attention`` passes on with such a call, with defaults. It passes on the others by themselves, or
refuses them."""


ON_POOL = (*ON_PAGES, "window", "backend", "sinks", "alibi_slopes")
"""The options that a call in the form of pages has, too."""
ABSENT: dict[str, Any] = {
    **dict.fromkeys(("mask", "bias", "key_ranges", "mask_mod", "score_mod", "seq_info", "dropout_rng")),
    **{"aux": (), "return_max_logit": False},
}
"""The other options, with the values that such a call has."""


def refuse(*excluded: object) -> None:
    """Raises SpecError for the first argument of ``EXCLUDED`` that is not None."""
    for (name, why), value in zip(EXCLUDED.items(), excluded, strict=True):
        if value is not None:
            raise SpecError(f"{name}: expected None with kv_lengths, kv_starts or cache_index, because {why}")


def check_arguments(rows: CacheRows, shapes: Mapping[str, tuple[int, ...]], others: Mapping[str, Any]) -> None:  # noqa: C901
    """Checks the three arrays by their metadata, and what they exclude.

    Args:
        shapes: of q, k and v with the sequence before the heads.
        others: the call's other arguments by name.

    Raises:
        SpecError, ShapeError, DTypeError, TypeError: naming the argument.
    """
    first = rows.first
    for name, why in EXCLUDED.items():
        if others.get(name) is not None:
            raise SpecError(f"{name}: expected None with {first}, because {why}")
    for name, shape in shapes.items():
        if len(shape) != 4:
            raise ShapeError(f"{name}: expected [batch, seq, heads, head_dim] with {first}, got {list(shape)}")
    for name, array in zip(rows._fields, rows):
        if array is None:
            continue
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"{name}: expected an int32 array [batch], got {type(array).__name__}")
        if tuple(array.shape) != (shapes["q"][0],):
            raise ShapeError(
                f"{name}: expected one number per row of q, shape [{shapes['q'][0]}], got {list(array.shape)}"
            )
        check_int32(name, array.dtype)
    for name in "kv":
        if rows.cache_index is None and shapes[name][0] != shapes["q"][0]:
            raise ShapeError(
                f"{name}: expected the batch of q ({shapes['q'][0]}) with {first}, got {shapes[name][0]}; for rows of "
                "a larger cache pass cache_index"
            )
    if rows.cache_index is not None and shapes["v"][0] != shapes["k"][0]:
        raise ShapeError(f"v: expected the rows of k ({shapes['k'][0]}), got {shapes['v'][0]}; one cache has both")
    if others["key_ranges"] is not None:
        ranges = others["key_ranges"]
        check_shape(tuple(ranges.shape), shapes["q"][0], shapes["k"][2], shapes["k"][1])
    functions = others["mask_mod"] is not None or others["score_mod"] is not None or len(others["aux"])
    if others["alibi_slopes"] is not None and functions and others["alignment"] != "top_left":
        raise SpecError(
            f"alibi_slopes: expected None with {first} and mask_mod or score_mod, because slopes become a score "
            "function of the lengths there; write them into score_mod"
        )


def value_check(
    q_len: int, kv_len: int, options: Mapping[str, Any], *, shifted: bool = False
) -> Callable[[CacheRows, int, int], None]:
    """Returns ``check_values``, or ``_check_whole_rows`` if queries that number the keys may be rows with padding.

    Args:
        options: the arguments of ``attention``, by name; the window is a pair.
        shifted: whether the caller means shifted rows of padding, as a call of flash-attn's ``seqused_k`` does.
    """
    # As many queries as keys are a prompt, perhaps with padding; fewer are new tokens at the end of a cache.
    may_be_padded = is_number(q_len) and is_number(kv_len) and q_len == kv_len
    shifts = not shifted and may_be_padded and has_diagonal(options) and options["alignment"] == "bottom_right"
    return _check_whole_rows if shifts else check_values


def _check_whole_rows(rows: CacheRows, kv_len: int, cache_batch: int) -> None:
    """Runs ``check_values``, and refuses rows that are padded on the right: their queries would lie too far left."""
    check_values(rows, kv_len, cache_batch)
    lengths = np.asarray(kv_len if rows.kv_lengths is None else rows.kv_lengths)
    if (padded := (lengths > 0) & (lengths < kv_len)).any():
        row = int(np.argmax(padded))
        raise SpecError(
            f"kv_lengths[{row}]={lengths[row]}: expected {kv_len} or 0 with alignment='bottom_right' and the {kv_len} "
            "queries of q, of which the last one stands at the row's last key; for rows that are padded on the right "
            "pass alignment='top_left', or pack them as documents"
        )


def has_diagonal(options: Mapping[str, Any]) -> bool:
    """Returns whether ``alignment`` has an effect: with causal, a window (a pair) or ALiBi."""
    return options["causal"] or options["window"] != (None, None) or options["alibi_slopes"] is not None


def check_values(rows: CacheRows, kv_len: int, cache_batch: int) -> None:
    """Checks the values of arrays that are on the host; those that are not are None.

    Args:
        cache_batch: the rows of k.

    Raises:
        SpecError: naming the first wrong value and its limits.
    """
    lengths, starts, index = (None if array is None else np.asarray(array) for array in rows)
    check_within("kv_lengths", lengths, kv_len, ", the tokens of a row of k")
    check_within("kv_starts", starts, kv_len, ", the tokens of a row of k")
    if lengths is not None:
        check_within("kv_starts", starts, lengths, ", the row's kv_lengths")
    check_within("cache_index", index, cache_batch - 1, ", the last row of k")


def clamped(rows: CacheRows, kv_len: int, cache_batch: int) -> CacheRows:
    """Returns the arrays with values in range, as arrays of their framework. Values in range do not change."""
    lengths, starts, index = rows
    lengths = None if lengths is None else lengths.clip(0, kv_len)
    if starts is not None:
        starts = starts.clip(0, kv_len)
        starts = starts if lengths is None else starts.clip(max=lengths)  # an empty row, not one of negative length
    return CacheRows(lengths, starts, None if index is None else index.clip(0, cache_batch - 1))


def takes_pages(sizes: tuple[int, ...], options: Mapping[str, Any]) -> bool:
    """Returns whether a call without gradients can have the form of pages.

    Args:
        sizes: the batch, q_len, kv_len and the rows of the cache.
        options: the arguments of ``attention``, by name; the window is a pair.
    """
    if has_diagonal(options) and options["alignment"] != "bottom_right":  # the only one that pages have
        return False
    if not all(map(is_number, sizes)) or 0 in sizes:  # a pool has pages of a size that is a number
        return False
    absent = ("mask", "bias", "key_ranges", "mask_mod", "score_mod")
    if any([options[name] is not None for name in absent]) or len(options["aux"]):
        return False
    return not (options["dropout"] or options["return_max_logit"])


def as_documents(
    xp: ModuleType, qkv: tuple[A, A, A], rows: CacheRows, tables: tuple[A, A], options: Mapping[str, Any]
) -> tuple[tuple[A, ...], dict[str, Any]]:
    """Returns the arrays and the keywords of ``attention`` for the same call on packed documents.

    Args:
        xp: ``torch`` or ``jax.numpy``.
        tables: int32, the first key of each row in the packed cache; and the offsets of q's rows, each twice.
        options: the arguments of ``attention`` by name.
    """
    (q, k, v), (first, queries) = qkv, tables
    (batch, count), kv_len = q.shape[:2], k.shape[1]
    lengths, starts, _ = clamped(rows, kv_len, k.shape[0])
    ends = first + (kv_len if lengths is None else lengths)
    # Two documents for each row: the keys between the row before and this one's first key, then this one's keys.
    edges = xp.stack((first if starts is None else first + starts, ends), 1).reshape(-1)
    keys = xp.concatenate((first[:1], edges, first[-1:] + kv_len))
    longest = kv_len if starts is None else 2 * kv_len
    dropped = ("layout", *EXCLUDED)
    others = {name: value for name, value in options.items() if name not in dropped}
    arrays = tuple([each.reshape(-1, *each.shape[2:]) for each in (q, k[:batch], v[:batch])])
    # Each row of q is a document, and so is what lies between the keys of two rows, which has no queries.
    return arrays, others | {"seq_info": SeqInfo(queries, keys, count, longest)}


def as_inputs(qkv: tuple[Array, ...], keywords: Mapping[str, Any]) -> tuple[Inputs, Options]:
    """Returns the inputs and options whose values ``checks`` looks at, of a call in the form with key ranges."""
    q, k, v = qkv
    inputs = Inputs(q, k, v, sinks=keywords["sinks"], key_ranges=keywords["key_ranges"])
    return inputs, check_options(Options.of(keywords))


def key_ranges_of(
    xp: ModuleType, key: Any, rows: CacheRows, q_len: int, theirs: Array | None, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns the key ranges that say which queries see each key, and which keys belong to each row.

    Args:
        xp: ``torch`` or ``jax.numpy``.
        key: the numbers 0 to kv_len - 1, int32.
        rows: valid arrays; cache_index is not read.
        theirs: the key ranges of the caller, or None.
        options: the arguments of ``attention`` by name; the window is a pair.

    Returns:
        int32 ``[batch, kv_heads or 1, kv_len, ranges, 2]``, with start equal to stop where no query sees a key; and
        bool ``[batch, kv_len]``.
    """
    left, right = options["window"]
    right = 0 if options["causal"] else right
    some = next(array for array in rows if array is not None)
    # ``some * 0``: an array of the caller's framework, device and mesh, which all others derive from.
    length = (some * 0 + key.shape[0] if rows.kv_lengths is None else rows.kv_lengths)[:, None]
    inside = key < length
    if rows.kv_starts is not None:
        inside = inside & (key >= rows.kv_starts[:, None])
    # The query at the key's own position. A window of keys, seen from the key, is one of queries, its sides exchanged.
    query = key - (length * 0 if options["alignment"] == "top_left" else length - q_len)
    start = (query - (FAR if right is None else min(right, FAR))).clip(0, q_len) * inside
    stop = (query + (FAR if left is None else min(left, FAR)) + 1).clip(0, q_len) * inside
    start, stop = start[:, None, :, None], stop[:, None, :, None]  # [batch, 1, kv_len, 1]
    if theirs is not None:
        start, stop = xp.maximum(start, theirs[..., 0]), xp.minimum(stop, theirs[..., 1])
        stop = xp.maximum(start, stop)  # disjoint ranges have no query in common
    return xp.stack((start, stop), -1), inside


def slopes_of_rows(axes: int) -> Expression:
    """Returns ``score - slope * |q + offset - k|`` for two arrays, the slopes and each row's offset; cached.

    Args:
        axes: of the slopes, ``[heads]`` or ``[batch, heads]``.
    """
    return _slopes_of_rows(axes)  # a compiler that must not look inside cannot mark a cache


@lru_cache(maxsize=2)
def _slopes_of_rows(axes: int) -> Expression:
    def score_mod(
        score: Symbol, b: Symbol, h: Symbol, q: Symbol, k: Symbol, slopes: SymbolicArray, offsets: SymbolicArray
    ) -> Symbol:
        slope = slopes[h] if axes == 1 else slopes[b, h]
        return score - slope * abs(q + offsets[b] - k)

    return trace_score(score_mod, (Aux((1,) * axes, "float32"), Aux((1,), "int32"))).tree
