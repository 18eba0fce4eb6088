"""The checks of ``flash_attn_with_kvcache``, and what it means, as plain data for both frontends.

A dense cache ``[rows, length, kv_heads, head_dim]`` is a pool of pages: row r is page r, which has ``length`` tokens,
and ``cache_batch_idx`` is the block table. So a dense cache and one in pages run through the same functions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError


class Cached(NamedTuple):
    """The arrays of a call on a cache, or their facts; None where the caller passed none.

    Attributes:
        q: ``[batch, seqlen_q, heads, head_dim]``, or ``[tokens, heads, head_dim]`` with cu_seqlens_q.
        k_cache, v_cache: ``[rows, length, kv_heads, head_dim]``, or a pool ``[num_pages, page_size, kv_heads, dim]``.
        k, v: the new tokens, ``[batch, seqlen_new, kv_heads, head_dim]``.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``.
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
    if (call.k is None) != (call.v is None):
        missing, other = ("v", "k") if call.v is None else ("k", "v")
        raise SpecError(f"{missing}: expected the new tokens beside {other}, got None")
    if (call.rotary_cos is None) != (call.rotary_sin is None):
        missing, other = ("rotary_sin", "rotary_cos") if call.rotary_sin is None else ("rotary_cos", "rotary_sin")
        raise SpecError(f"{missing}: expected an array beside {other}, got None")
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
    for name, facts in call._asdict().items():
        if facts is not None and facts.device != call.q.device:
            raise DeviceError(
                f"{_shown(name, table)}: expected the device of q ({call.q.device}), got {facts.device}; move it there"
            )
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
        _check_rotary(call.rotary_cos, call.rotary_sin, call.q)


def _shown(name: str, table: str) -> str:
    return table if name == "block_table" else name


def _check_attention(call: Cached, batch: int) -> None:
    """Checks what attention would find only after the new tokens are in the cache."""
    heads, head_dim = call.q.shape[-2:]
    rows, length, kv_heads, _ = call.k_cache.shape
    if call.k_cache.shape[3] != head_dim:
        raise ShapeError(f"k_cache: expected the head_dim of q ({head_dim}), got {call.k_cache.shape[3]}")
    if not kv_heads or heads % kv_heads:
        raise ShapeError(f"k_cache: expected kv heads that divide the {heads} query heads, got {kv_heads}")
    if tuple(call.v_cache.shape[:3]) != (rows, length, kv_heads):
        raise ShapeError(
            f"v_cache: expected [{rows}, {length}, {kv_heads}, head_dim] as k_cache, got {list(call.v_cache.shape)}"
        )
    for name in ("k_cache", "v_cache", "k", "v"):
        facts = getattr(call, name)
        if facts is not None and facts.dtype != call.q.dtype:
            raise DTypeError(f"{name}: expected the dtype of q, {call.q.dtype}, got {facts.dtype}; cast it")
    if call.alibi_slopes is not None and tuple(call.alibi_slopes.shape) not in ((heads,), (batch, heads)):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{heads}] or [batch, heads] = [{batch}, {heads}], got "
            f"{list(call.alibi_slopes.shape)}"
        )


def _check_tables(call: Cached, batch: int, table: str) -> None:
    width = None if call.block_table is None or len(call.block_table.shape) != 2 else call.block_table.shape[1]
    rows: dict[str, tuple[int | str, ...]] = {
        "cache_seqlens": (batch,),
        "cache_batch_idx": (batch,),
        "cache_leftpad": (batch,),
    }
    rows |= {"block_table": (batch, "width" if width is None else width), "cu_seqlens_q": (batch + 1,)}
    for name, expected in rows.items():
        facts: ArrayFacts | None = getattr(call, name)
        if facts is None:
            continue
        if tuple(facts.shape) != expected:
            text = "[" + ", ".join(map(str, expected)) + "]"
            raise ShapeError(f"{_shown(name, table)}: expected shape {text}, got {list(facts.shape)}")
        if facts.dtype != "int32":
            raise DTypeError(f"{_shown(name, table)}: expected dtype int32, got {facts.dtype}; cast it to int32")
    if call.block_table is None and call.cache_batch_idx is None and call.k_cache.shape[0] < batch:
        raise ShapeError(
            f"k_cache: expected a row for each of the {batch} sequences of q, got {call.k_cache.shape[0]}; "
            "cache_batch_idx names the row of each"
        )


def _check_new(call: Cached, batch: int) -> None:
    tokens = call.k.shape[1] if len(call.k.shape) == 4 else "seqlen_new"
    for name in ("k", "v"):
        expected = (batch, tokens, *getattr(call, f"{name}_cache").shape[2:])
        if tuple(getattr(call, name).shape) != expected:
            text = "[" + ", ".join(map(str, expected)) + "]"
            raise ShapeError(f"{name}: expected shape {text}, got {list(getattr(call, name).shape)}")


def _check_rotary(cos: ArrayFacts, sin: ArrayFacts, q: ArrayFacts) -> None:
    if len(cos.shape) != 2 or 0 in cos.shape:
        raise ShapeError(f"rotary_cos: expected [positions, rotary_dim / 2], got {list(cos.shape)}")
    if 2 * cos.shape[1] > q.shape[-1]:
        raise ShapeError(
            f"rotary_cos: expected [positions, rotary_dim / 2] with rotary_dim up to the head_dim {q.shape[-1]}, got "
            f"{list(cos.shape)}, a rotary_dim of {2 * cos.shape[1]}"
        )
    if sin.shape != cos.shape:
        raise ShapeError(f"rotary_sin: expected the shape of rotary_cos, {list(cos.shape)}, got {list(sin.shape)}")


def check_values(tables: tuple[Any, Any, Any], capacity: int, rows: int, new: int) -> None:
    """Checks the values of tables on the host.

    Args:
        tables: cache_seqlens, cache_batch_idx and cache_leftpad, numpy ``[batch]`` each, or None.
        capacity: the tokens that a sequence has room for. rows: of the cache. new: tokens to append to each sequence.

    Raises:
        SpecError: naming the table, the entry and the limit.
    """
    seqlens, index, leftpad = tables
    if seqlens is not None and (wrong := (seqlens < 0) | (seqlens > capacity - new)).any():
        at = int(np.argmax(wrong))
        beside = f" beside {new} new ones" if new else ""
        limit = f"0 to {capacity - new} tokens{beside}, because a sequence has room for {capacity}"
        raise SpecError(f"cache_seqlens[{at}]={seqlens[at]}: expected {limit}")
    if index is not None and (wrong := (index < 0) | (index >= rows)).any():
        at = int(np.argmax(wrong))
        raise SpecError(f"cache_batch_idx[{at}]={index[at]}: expected a row of the cache, 0 to {rows - 1}")
    if index is not None and new and len(np.unique(index)) < len(index):
        raise SpecError(f"cache_batch_idx={index.tolist()}: expected different rows, because k and v are appended")
    if leftpad is not None:
        most = np.full(leftpad.shape, capacity) if seqlens is None else seqlens
        if (wrong := (leftpad < 0) | (leftpad > most)).any():
            at = int(np.argmax(wrong))
            raise SpecError(f"cache_leftpad[{at}]={leftpad[at]}: expected 0 to {most[at]}, the tokens in the cache")


def check_positions(seqlens: Any, new: int, positions: int) -> None:
    """Checks on the host that rotary tables of so many positions have that of every new token."""
    needed = seqlens + new
    if (wrong := needed > positions).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"rotary_cos: expected at least {needed[at]} positions for cache_seqlens[{at}]={seqlens[at]}, got "
            f"{positions}"
        )


def whole_length(value: Any, capacity: int, new: int) -> int:
    """Returns ``cache_seqlens`` that is one int for all sequences. Raises SpecError unless it fits the cache."""
    if not 0 <= value <= capacity - new:
        beside = f" beside {new} new ones" if new else ""
        raise SpecError(
            f"cache_seqlens={value}: expected 0 to {capacity - new} tokens{beside}, because a sequence has room for "
            f"{capacity}"
        )
    return int(value)
