"""Checks the arguments of a paged call for both frontends and builds its spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_core.call.arguments import ArrayFacts, check_one_place
from attn_core.call.key_ranges import LAYOUT_OF_PAGES, check_shape
from attn_core.call.kinds import check_int32, is_number
from attn_core.call.options import ON_PAGES, Options, check_flag
from attn_core.call.spec import DTYPES, AttentionSpec, PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged import rotary
from attn_core.paged.quantised import channels, check_beside_pool, check_pool_dtype, page_dtype, scales_kind
from attn_core.paged.tables import check_table_types

ARGUMENTS = tuple([{"k": "k_pages", "v": "v_pages"}.get(name, name) for name in PagedInputs._fields])
"""The names of the arrays of a call as arguments."""


def build_spec(arrays: PagedInputs, options: Options) -> AttentionSpec:
    """Builds the spec of a call on keys and values in pages.

    Args:
        arrays: the metadata of each array, as ``ArrayFacts``; None for a missing one.
        options: checked. ``max_len_q`` bounds the queries of a sequence; None means the tokens of
            q.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: naming argument, value, what was expected and the remedy.
    """
    check_one_place(dict(zip(ARGUMENTS, arrays, strict=True)), "q")
    paged, batch = _check_pool(arrays)
    if len(arrays.q.shape) != 3:
        raise ShapeError(f"q: expected [tokens, heads, head_dim], got {list(arrays.q.shape)}")
    tokens, heads, head_dim = arrays.q.shape
    if channels(arrays.k) != head_dim:
        raise ShapeError(f"k_pages: expected the head_dim of q ({head_dim}), got {channels(arrays.k)}")
    if arrays.sinks is not None and arrays.sinks.shape != (heads,):
        raise ShapeError(f"sinks: expected one logit per query head, shape [{heads}], got {list(arrays.sinks.shape)}")
    ranges_shape = None if arrays.key_ranges is None else tuple(arrays.key_ranges.shape)
    check_shape(ranges_shape, 1, arrays.k.shape[2], tokens, LAYOUT_OF_PAGES)
    # Without a bound, one sequence may have all tokens of q.
    longest = tokens if options.max_len_q is None else options.max_len_q
    numbers = is_number(tokens) and is_number(batch)
    if arrays.cu_seqlens_q is None:
        if tokens != batch:
            raise ShapeError(
                f"cu_seqlens_q: expected the queries' offsets, got None, which means one query for each of the {batch} "
                f"sequences of block_table, but q has {tokens}"
            )
        if longest < 1 <= tokens:
            raise SpecError(f"max_len_q={longest}: expected 1 or more, because each sequence has one query")
        longest = 1
    most = min(longest, tokens) if numbers else longest
    if arrays.cu_seqlens_q is not None and numbers and tokens == batch:
        # One query each is a case of its own for kernels (``one_query_each``), and offsets may mean something else: a
        # sequence without queries, and tokens after the last offset.
        most = max(most, 2)
    plain: dict[str, Any] = {name: getattr(options, name) for name in (*ON_PAGES, "window")}
    return AttentionSpec(
        # Queries are packed in one row: the sequences are the spec's documents, not its batch.
        batch=1,
        q_len=tokens,
        kv_len=paged.capacity,
        num_heads=heads,
        num_kv_heads=arrays.k.shape[2],
        head_dim=head_dim,
        value_dim=channels(arrays.v),
        dtype=arrays.q.dtype,
        key_ranges_shape=ranges_shape,
        alibi_shape=None if arrays.alibi_slopes is None else tuple(arrays.alibi_slopes.shape),
        sinks=arrays.sinks is not None,
        documents=batch,
        max_len_q=most,
        # seq_lens may be on a device, so the capacity of a row bounds the longest sequence.
        max_len_k=paged.capacity,
        paged=paged,
        **plain,
    )


def one_query_each(spec: AttentionSpec) -> bool:
    """Returns whether every sequence of a paged call has exactly one query: true for calls without cu_seqlens_q."""
    return spec.max_len_q == 1 and spec.q_len == spec.documents


def check_pool(k_pages: ArrayFacts, v_pages: ArrayFacts) -> None:
    """Raises ShapeError or DTypeError unless two arrays are one pool of keys and values."""
    # A pool may have no page, but a page has at least one token, head and channel.
    for name, facts in (("k_pages", k_pages), ("v_pages", v_pages)):
        if len(facts.shape) != 4 or 0 in facts.shape[1:]:
            raise ShapeError(f"{name}: expected [num_pages, page_size, kv_heads, dim], got {list(facts.shape)}")
        check_pool_dtype(name, facts)
    if k_pages.shape[:3] != v_pages.shape[:3]:
        raise ShapeError(
            f"v_pages: expected the pages, page size and heads of k_pages, {list(k_pages.shape[:3])}, "
            f"got {list(v_pages.shape[:3])}"
        )
    if k_pages.dtype != v_pages.dtype:
        raise DTypeError(f"v_pages: expected the dtype of k_pages, {k_pages.dtype}, got {v_pages.dtype}; cast it")


def check_append(named: dict[str, ArrayFacts | None]) -> None:
    """Checks the arrays of ``append_kv``, by the names of its arguments.

    Raises:
        ShapeError, DTypeError, DeviceError: naming argument, value and what was expected.
    """
    check_one_place(named, "k_pages")
    facts = {name: array for name, array in named.items() if array is not None}
    k_pages, v_pages = facts["k_pages"], facts["v_pages"]
    check_pool(k_pages, v_pages)
    # A k without axes has no token axis to read; the comparison of shapes below refuses it.
    tokens = facts["k"].shape[0] if facts["k"].shape else 0
    for name, pool in (("k", k_pages), ("v", v_pages)):
        expected = (tokens, pool.shape[2], channels(pool))
        if facts[name].shape != expected:
            raise ShapeError(
                f"{name}: expected [tokens, kv_heads, dim] = {list(expected)}, got {list(facts[name].shape)}"
            )
        check_beside_pool(name, facts[name], f"{name}_pages", pool)
    scales_kind(k_pages, {name: facts.get(name) for name in ("k_scales", "v_scales")})
    if rotary.COS in facts:
        names = (rotary.COS, rotary.SIN)
        rotary.check_tables(facts[names[0]], facts[names[1]], facts["k"], names)
    if "positions" in facts:
        rotary.check_positions(facts["positions"], (tokens,))
    if "slot_mapping" in facts:
        slots = facts["slot_mapping"]
        check_table_types("slot_mapping", slots.dtype, slots.shape, (tokens,))
    else:
        batch, _ = _check_tables(facts["block_table"], facts["seq_lens"], facts.get("cu_seqlens_q"))
        if "cu_seqlens_q" not in facts and tokens != batch:
            raise ShapeError(
                f"cu_seqlens_q: expected the new tokens' offsets, got None, which means one token for each of the "
                f"{batch} sequences of block_table, but k has {tokens}"
            )


def check_choice(
    tables: Mapping[str, object],
    slot_mapping: object,
    cos: object,
    rotary_interleaved: object = False,
    positions: object = None,
) -> None:
    """Checks which arguments of ``append_kv`` are passed together.

    Args:
        tables: block_table, seq_lens and cu_seqlens_q by name. cos: None without rotary.

    Raises:
        SpecError: naming the argument that is one too many, or missing.
    """
    check_flag("rotary_interleaved", rotary_interleaved)
    if cos is None and rotary_interleaved:
        raise SpecError("rotary_interleaved=True: expected False without rotary; pass rotary=(cos, sin)")
    if cos is None and positions is not None:
        raise SpecError("positions: expected None without rotary, because nothing else reads them")
    if slot_mapping is None:
        return
    for name, table in tables.items():
        if table is not None:
            raise SpecError(f"{name}: expected None with slot_mapping, which says where tokens are written; pass one")
    if cos is not None and positions is None:
        raise SpecError("positions: expected each token's position, got None; slot_mapping does not say it to rotary")


def _check_tables(table: ArrayFacts, seq_lens: ArrayFacts, cu_seqlens_q: ArrayFacts | None) -> tuple[int, int]:
    """Checks the tables of a call; returns the number of sequences and the columns of the block table."""
    check_table_types("block_table", table.dtype, table.shape, ("batch", "width"))
    batch, width = table.shape
    check_table_types("seq_lens", seq_lens.dtype, seq_lens.shape, (batch,))
    if cu_seqlens_q is not None:
        check_table_types("cu_seqlens_q", cu_seqlens_q.dtype, cu_seqlens_q.shape, (batch + 1,))
    return batch, width


def _check_pool(arrays: PagedInputs) -> tuple[PagedKV, int]:
    """Checks the pool and the tables. Returns the pool's sizes and the number of sequences."""
    check_pool(arrays.k, arrays.v)
    check_beside_pool("q", arrays.q, "k_pages", arrays.k)
    scales = scales_kind(arrays.k, {"k_scales": arrays.k_scales, "v_scales": arrays.v_scales})
    batch, width = _check_tables(arrays.block_table, arrays.seq_lens, arrays.cu_seqlens_q)
    for name, facts in (("sinks", arrays.sinks), ("alibi_slopes", arrays.alibi_slopes)):
        if facts is not None and facts.dtype not in DTYPES:
            raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {facts.dtype}; cast it")
    for name, facts in (("kv_starts", arrays.kv_starts), ("key_ranges", arrays.key_ranges)):
        check_int32(name, "int32" if facts is None else facts.dtype)
    if arrays.kv_starts is not None:
        check_table_types("kv_starts", "int32", arrays.kv_starts.shape, (batch,))
    pages, size = arrays.k.shape[:2]
    pool = PagedKV(
        num_pages=pages,
        page_size=size,
        width=width,
        starts=arrays.kv_starts is not None,
        dtype=page_dtype(arrays.k),
        scales=scales,
    )
    return pool, batch
