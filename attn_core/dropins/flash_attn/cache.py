"""Calls on a cache: their checks, and the steps that append, rotate and attend.

A dense cache ``[rows, length, kv_heads, head_dim]`` is a pool of pages: row r is page r, which has ``length`` tokens,
and ``cache_batch_idx`` is the block table. So a dense cache and one in pages run through the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.arguments import ArrayFacts, check_one_place, check_qkv
from attn_core.call.kinds import check_int32, check_within, is_host_int
from attn_core.call.options import Options, check_options
from attn_core.call.tensors import Array
from attn_core.dropins.flash_attn.arguments import CACHE, places_in_documents
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.rotary import check_tables


class Cached(NamedTuple):
    """The arrays of a call on a cache, or their facts; None where the caller passed none.

    Attributes:
        q: ``[batch, seqlen_q, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with cu_seqlens_q.
        k_cache, v_cache: ``[rows, length, kv_heads, head_dim]``, or a pool ``[num_pages, page_size, kv_heads, dim]``.
        k, v: the new tokens, ``[batch, seqlen_new, kv_heads, head_dim]``.
        rotary_cos, rotary_sin: ``[max_positions, rotary_dim / 2]``.
        cache_seqlens: int32 ``[batch]``: tokens in the cache before the new ones.
        cache_batch_idx: int32 ``[batch]``: the row of the cache of each sequence.
        cache_leftpad: int32 ``[batch]``: the place of its first key.
        block_table: int32 ``[batch, width]``.
        cu_seqlens_q: int32 ``[batch + 1]``.
        alibi_slopes: ``[heads]`` or ``[batch, heads]``.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any = None
    v: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None
    cu_seqlens_q: Any = None
    alibi_slopes: Any = None


def check_combination(call: Cached, table: str = "block_table") -> None:
    """Raises SpecError for arguments that exclude or need each other.

    Args:
        call: only which of its fields are None counts.
        table: the name of ``block_table`` for the caller.
    """
    for one, other, what in (("k", "v", "the new tokens"), ("rotary_cos", "rotary_sin", "an array")):
        if (getattr(call, one) is None) != (getattr(call, other) is None):
            missing, given = (other, one) if getattr(call, other) is None else (one, other)
            raise SpecError(f"{missing}: expected {what} beside {given}, got None")
    if call.rotary_cos is not None and call.k is None:
        raise SpecError("rotary_cos: expected k and v with it, because a call without new tokens rotates nothing")
    if call.k is not None and call.cache_seqlens is None:
        raise SpecError("cache_seqlens: expected the tokens in the cache, where k and v are appended, got None")
    if call.block_table is not None:
        if call.cache_batch_idx is not None:
            raise SpecError(f"cache_batch_idx: expected None with {table}, which names the pages of each sequence")
        if call.cache_leftpad is not None:
            raise SpecError(f"cache_leftpad: expected None with {table}; leave the padding out of the pages")


def check_facts(call: Cached, table: str = "block_table") -> None:
    """Checks shapes, dtypes and devices. Raises ShapeError, DTypeError or DeviceError, naming the argument.

    Args:
        call: of ``ArrayFacts``.
        table: the name of ``block_table`` for the caller.
    """
    check_one_place({_shown(name, table): facts for name, facts in call._asdict().items()}, "q")
    packed = call.cu_seqlens_q is not None
    if len(call.q.shape) != (3 if packed else 4):
        axes = "[tokens, heads, head_dim] with cu_seqlens_q" if packed else "[batch, seqlen_q, heads, head_dim]"
        raise ShapeError(f"q: expected {axes}, got {list(call.q.shape)}")
    for name in ("k_cache", "v_cache"):
        shape = getattr(call, name).shape
        if len(shape) != 4:
            raise ShapeError(f"{name}: expected [rows, length, kv_heads, head_dim], got {list(shape)}")
    batch = call.cu_seqlens_q.shape[0] - 1 if packed and len(call.cu_seqlens_q.shape) == 1 else call.q.shape[0]
    _check_attention(call, batch)
    _check_tables(call, batch, table)
    if call.k is not None:
        _check_new(call, batch)
    if call.rotary_cos is not None:
        check_tables(call.rotary_cos, call.rotary_sin, call.q, ("rotary_cos", "rotary_sin"))


def _shown(name: str, table: str) -> str:
    return table if name == "block_table" else name


def _check_attention(call: Cached, batch: int) -> None:
    """Checks what attention would find only after the new tokens are in the cache."""
    q, k, v = (each._replace(shape=(batch, *each.shape[-3:])) for each in call[:3])
    check_qkv(q, k, v, names=("q", "k_cache", "v_cache"))
    heads, rows = call.q.shape[-2], call.k_cache.shape[0]
    if call.v_cache.shape[0] != rows:
        raise ShapeError(f"v_cache: expected the {rows} rows of k_cache, got {call.v_cache.shape[0]}")
    for name in ("k", "v"):
        new = getattr(call, name)
        if new is not None and new.dtype != call.q.dtype:
            raise DTypeError(f"{name}: expected the dtype of q, {call.q.dtype}, got {new.dtype}; cast it")
    if call.alibi_slopes is not None and tuple(call.alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{heads}] or [batch, heads] = [{batch}, {heads}], got "
            f"{list(call.alibi_slopes.shape)}"
        )


def _check_tables(call: Cached, batch: int, table: str) -> None:
    """Checks shape and dtype of the integer arrays, by which the sequences find their rows and pages of the cache.

    Args:
        table: the caller's name of ``block_table``, for errors.
    """
    # A word stands for a size that may be anything; it matches no size, so a table without two axes is refused.
    width = call.block_table.shape[1] if call.block_table is not None and len(call.block_table.shape) == 2 else "width"
    expected_shapes: dict[str, tuple[int | str, ...]] = {
        "cache_seqlens": (batch,),
        "cache_batch_idx": (batch,),
        "cache_leftpad": (batch,),
        "block_table": (batch, width),
        "cu_seqlens_q": (batch + 1,),
    }
    for name, expected in expected_shapes.items():
        facts: ArrayFacts | None = getattr(call, name)
        if facts is None:
            continue
        if tuple(facts.shape) != expected:
            raise ShapeError(f"{_shown(name, table)}: expected shape {_as_shape(expected)}, got {list(facts.shape)}")
        check_int32(_shown(name, table), facts.dtype)
    if call.block_table is None and call.cache_batch_idx is None and call.k_cache.shape[0] < batch:
        raise ShapeError(
            f"k_cache: expected a row for each of the {batch} sequences of q, got {call.k_cache.shape[0]}; "
            "cache_batch_idx names the row of each"
        )


def _check_new(call: Cached, batch: int) -> None:
    """Checks the shapes of the tokens to append, k and v: as many for each sequence, with the cache's heads."""
    tokens = call.k.shape[1] if len(call.k.shape) == 4 else "seqlen_new"  # a word for any size, as in _check_tables
    for name in ("k", "v"):
        expected = (batch, tokens, *getattr(call, f"{name}_cache").shape[2:])
        given = getattr(call, name).shape
        if tuple(given) != expected:
            raise ShapeError(f"{name}: expected shape {_as_shape(expected)}, got {list(given)}")


def _as_shape(sizes: tuple[int | str, ...]) -> str:
    return "[" + ", ".join(map(str, sizes)) + "]"


def check_values(call: Cached, tables: tuple[np.ndarray | None, ...], capacity: int, new: int) -> None:
    """Checks the values of tables on the host.

    Args:
        tables: cache_seqlens, cache_batch_idx and cache_leftpad, numpy ``[batch]`` each, or None.
        capacity: the tokens that a sequence has room for. new: tokens to append to each sequence.

    Raises:
        SpecError: naming the table, the entry and the limit.
    """
    seqlens, index, leftpad = tables
    rows = call.k_cache.shape[0]
    check_within("cache_seqlens", seqlens, capacity - new, _room(capacity, new))
    check_within("cache_batch_idx", index, rows - 1, ", the last row of the cache")
    if index is not None and new and len(np.unique(index)) < len(index):
        raise SpecError(f"cache_batch_idx={index.tolist()}: expected different rows, because k and v are appended")
    if leftpad is not None:
        check_within("cache_leftpad", leftpad, capacity if seqlens is None else seqlens, ", the tokens in the cache")
    if call.rotary_cos is not None:
        positions = call.rotary_cos.shape[0]
        check_within("cache_seqlens", seqlens, positions - new, f", because rotary_cos has {positions} positions")


def whole_length(value: int, capacity: int, new: int) -> int:
    """Returns ``cache_seqlens`` that is one int for all sequences. Raises SpecError unless it fits the cache."""
    if not 0 <= value <= capacity - new:
        raise SpecError(f"cache_seqlens={value}: expected 0 to {capacity - new}{_room(capacity, new)}")
    return int(value)


def _room(capacity: int, new: int) -> str:
    beside = f" beside {new} new ones" if new else ""
    return f" tokens{beside}, because a sequence has room for {capacity}"


def attend(
    frontend: Frontend,
    call: Cached,
    interleaved: bool,
    options: dict[str, Any],
    table: str = "block_table",
    longest: int | None = None,
    names: Mapping[str, str] = CACHE,
) -> tuple[Any, tuple[Array, Array]]:
    """Appends, rotates and attends. Returns the output, or (output, log-sum-exp), in the shape of q; and both caches.

    A backward through the results is refused, except for a whole cache.

    Args:
        options: keywords of ``paged_attention``.
        table: the caller's name of ``block_table``.
        longest: with cu_seqlens_q, a host int, at least the most queries of a sequence.
        names: the caller's names of arguments.
    """
    results = frontend.seen(call, interleaved, options, table, longest)
    if results is not None:
        return results, (call.k_cache, call.v_cache)
    run = partial(_checked_and_run, frontend, call, interleaved, options, table, longest)
    if is_whole(call):
        return run()
    arrays = call._asdict() | {"sinks": options.get("sinks")}
    named = {names.get(name, name): array for name, array in arrays.items() if array is not None}
    return frontend.without_gradient(run, **named)  # type: ignore[no-any-return]


def is_whole(call: Cached) -> bool:
    """Returns whether every sequence has all keys of its own row."""
    places = (call.cache_seqlens, call.block_table, call.cache_batch_idx, call.cache_leftpad, call.cu_seqlens_q)
    return all([each is None for each in places])


def _checked_and_run(
    frontend: Frontend, call: Cached, interleaved: bool, options: dict[str, Any], table: str, longest: int | None
) -> Any:
    """Runs a call, after all checks. The arguments are those of ``attend``."""
    check_combination(call, table)
    check_options(Options.of(options | {"max_len_q": longest}))
    call = _checked(frontend, call, table)
    if is_whole(call) and call.k_cache.shape[0] == call.q.shape[0]:
        results = frontend.attention(call.q, call.k_cache, call.v_cache, alibi_slopes=call.alibi_slopes, **options)
        return results, (call.k_cache, call.v_cache)
    run = partial(_run_in_pages, frontend, interleaved, options, longest)
    return frontend.on_mesh(run, call, options["return_lse"])


def _checked(frontend: Frontend, call: Cached, table: str) -> Cached:
    """Returns the call, checked, with cache_seqlens as an array, or None for the whole length."""
    seqlens = call.cache_seqlens
    single = is_host_int(seqlens)
    call = call._replace(cache_seqlens=None) if single else call
    for name, array in call._asdict().items():
        if array is not None:
            frontend.check_array(_shown(name, table), array)
    check_facts(Cached(*[None if array is None else frontend.facts(array) for array in call]), table)
    new = 0 if call.k is None else call.k.shape[1]
    capacity = call.k_cache.shape[1] * (1 if call.block_table is None else call.block_table.shape[1])
    if single:
        seqlens = _lengths(frontend, call, whole_length(seqlens, capacity, new))
    tables = seqlens, call.cache_batch_idx, call.cache_leftpad
    on_host = frontend.values_on_host(call.q, *tables)
    if on_host is not None:
        check_values(call, on_host, capacity, new)
    return call._replace(cache_seqlens=seqlens)


def _batch(call: Cached) -> int:
    return len(call.q) if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1


def _lengths(frontend: Frontend, call: Cached, length: int) -> Array:
    """Returns the same length for every sequence, int32 ``[batch]``."""
    numpy = frontend.numpy
    return numpy.full((_batch(call),), length, dtype=numpy.int32, device=frontend.device(call.q))


def _run_in_pages(
    frontend: Frontend, interleaved: bool, options: dict[str, Any], longest: int | None, call: Cached
) -> Any:
    """Appends, rotates and attends on pages. The arguments are those of ``attend``, checked."""
    batch, device, new = _batch(call), frontend.device(call.q), 0 if call.k is None else call.k.shape[1]
    pages, before = call.block_table, call.cache_seqlens
    if pages is None:
        index = call.cache_batch_idx
        pages = frontend.rows_as_table(batch, device) if index is None else index[:, None]
    if before is None:
        before = _lengths(frontend, call, pages.shape[1] * call.k_cache.shape[1])
    seq_lens = before + new if new else before
    how = {**options, "block_table": pages, "seq_lens": seq_lens, **_queries(frontend, call, longest)}
    if call.alibi_slopes is not None:
        how["alibi_slopes"] = call.alibi_slopes
    if call.cache_leftpad is not None:
        how["kv_starts"] = call.cache_leftpad
    q = call.q
    if call.rotary_cos is not None:  # before anything is written, because it may find a position that the tables lack
        banded = options["causal"] or options["window"] is not None
        positions = _positions(frontend, call, before, banded)
        q = frontend.apply_rotary(q, call.rotary_cos, call.rotary_sin, positions=positions, interleaved=interleaved)
    q = q if call.cu_seqlens_q is not None else _end_to_end(q)
    caches = call.k_cache, call.v_cache
    if new:
        attend_pages = frontend.planned((q, *caches), how)  # before anything is written, too: it may find no backend
        caches = frontend.append(call, pages, seq_lens, interleaved)
        results = attend_pages(*caches)
    else:
        results = frontend.paged_attention(q, *caches, **how)
    if call.cu_seqlens_q is not None:
        return results, caches
    out, lse = results if options["return_lse"] else (results, None)
    rows = call.q.shape[:2]
    out = out.reshape(*rows, *out.shape[1:])  # [batch * seqlen_q, heads, dim] -> [batch, seqlen_q, heads, dim]
    if lse is None:
        return out, caches
    # [heads, batch * seqlen_q] -> [batch, heads, seqlen_q]
    return (out, lse.reshape(lse.shape[0], *rows).swapaxes(0, 1)), caches


def _queries(frontend: Frontend, call: Cached, longest: int | None) -> dict[str, Any]:
    """Returns the keywords that say which queries belong to each sequence."""
    if call.cu_seqlens_q is not None:
        return {"cu_seqlens_q": call.cu_seqlens_q, "max_len_q": longest}
    tokens = frontend.facts(call.q).shape[1]
    if tokens == 1:
        return {}
    offsets = frontend.equal_offsets(_batch(call), tokens, frontend.device(call.q))
    return {"cu_seqlens_q": offsets, "max_len_q": tokens}


def _positions(frontend: Frontend, call: Cached, before: Array, banded: bool) -> Array:
    """Returns the rotary position of each query, int32 ``[batch, seqlen_q]`` or, with offsets, ``[tokens]``."""
    if call.cu_seqlens_q is None:
        return frontend.positions(before, frontend.facts(call.q).shape[1], banded)
    documents, places = places_in_documents(frontend, call.cu_seqlens_q, len(call.q))
    first = before[documents.clip(max=before.shape[0] - 1)]
    return first + places if banded else first


def append_arguments(
    call: Cached, pages: Array, seq_lens: Array, interleaved: bool, offsets: Array | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of ``append_kv`` for the new tokens.

    Args:
        pages: the block table. seq_lens: the lengths that count the new tokens.
        offsets: those of the new tokens of each sequence, None if that is one.
    """
    tables: dict[str, Any] = {"block_table": pages, "seq_lens": seq_lens, "cu_seqlens_q": offsets}
    if call.rotary_cos is not None:
        tables |= {"rotary": (call.rotary_cos, call.rotary_sin), "rotary_interleaved": interleaved}
    return (call.k_cache, call.v_cache, _end_to_end(call.k), _end_to_end(call.v)), tables


def _end_to_end(array: Array) -> Array:
    """Returns ``[batch, tokens, heads, dim]`` as ``[batch * tokens, heads, dim]``."""
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
