"""The values of a paged call's arrays that are on the host: their checks, and where an append writes its tokens.

``k_pages`` and ``v_pages`` are ``[num_pages, page_size, kv_heads, dim]``. Row b of ``block_table`` (int32, ``[batch,
width]``) has the pages of sequence b in the order of its tokens, then -1. ``seq_lens`` (int32, ``[batch]``) has the
tokens of each sequence, including the tokens of the call's queries. A slot has room for one token; its number is
``page * page_size + offset``.

``check_read`` and ``places_of_append`` take numpy arrays by the names of the arguments: None for an argument that the
call does not have, and no entry for an array that is elsewhere. Shapes and dtypes have been checked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from attn_core.call import key_ranges
from attn_core.call.kinds import check_within
from attn_core.call.seq_info import check_cu_seqlens
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged import rotary
from attn_core.paged.quantised import check_used_scales

TABLES = ("block_table", "seq_lens", "cu_seqlens_q")
SCALES = ("k_scales", "v_scales")
READ = (*TABLES, *SCALES, "key_ranges", "kv_starts")
"""The arrays of a paged call whose values are checked."""
Values = Mapping[str, np.ndarray | None]


def check_values(
    paged: PagedKV,
    tokens: int,
    max_len_q: int | None,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray | None,
    *,
    writes: bool = False,
) -> None:
    """Checks the values of a call's tables, which are on the host and have the right shapes and dtypes.

    A call checks them once: in the frontend if it sees the values, otherwise where a traced call runs. A backend trusts
    tables on the CPU.

    Args:
        tokens: of q. max_len_q: the most queries of a sequence; None: as many as there are tokens.
        cu_seqlens_q: the offsets of the queries; None if each sequence has one query.
        writes: whether the keys of the queries will be written, so that each needs a slot.

    Raises:
        SpecError: for lengths below 0 or beyond the table, pages outside the pool, wrong offsets, and, for writes,
            fewer tokens than queries.
    """
    if cu_seqlens_q is not None:
        check_offsets(cu_seqlens_q, tokens, max_len_q)
    lengths = np.asarray(seq_lens, np.int64)
    # The lengths come first, because the check of pages below takes from them which entries are used.
    room = f"the block table has {paged.width} pages of {paged.page_size} for each sequence"
    check_within("seq_lens", lengths, paged.capacity, f" tokens, because {room}")
    queries = np.ones_like(lengths) if cu_seqlens_q is None else np.diff(np.asarray(cu_seqlens_q, np.int64))
    if writes and (short := queries > lengths).any():
        at = int(np.argmax(short))
        raise SpecError(
            f"seq_lens[{at}]={lengths[at]}: expected at least the {queries[at]} queries of the sequence; "
            "seq_lens includes the new tokens"
        )
    # Entries after a sequence's last page may hold any value, because no kernel reads their pages.
    used = np.arange(paged.width) * paged.page_size < lengths[:, None]  # [batch, width]
    table = np.asarray(block_table)
    if (wrong := used & ((table < 0) | (table >= paged.num_pages))).any():
        row, column = (int(index) for index in np.argwhere(wrong)[0])
        raise SpecError(
            f"block_table[{row}, {column}]={int(table[row, column])}: expected a page of the pool's {paged.num_pages} "
            f"for token {column * paged.page_size} of {lengths[row]}"
        )


FEW_ENTRIES = 512
"""Up to this many entries of a table are worth ``are_valid``: each of numpy's functions takes a microsecond."""


def are_valid(paged: PagedKV, rows: list[list[int]], lengths: list[int], least: list[int] | None = None) -> bool:
    """Returns whether the lengths fit the table, and all entries in use are pages of the pool; for short tables.

    Args:
        rows, lengths: the values of block_table and seq_lens.
        least: the smallest length allowed for each sequence; None: 0.
    """
    size, most, capacity = paged.page_size, paged.num_pages, paged.capacity
    for row, length in zip(rows, lengths):
        used = row[: -(-length // size)]
        if not 0 <= length <= capacity or (used and (min(used) < 0 or max(used) >= most)):
            return False
    return least is None or not any([length < fewest for length, fewest in zip(lengths, least)])


def check_offsets(cu_seqlens_q: np.ndarray, tokens: int, max_len_q: int | None) -> None:
    """Checks offsets on the host of sequences with ``tokens`` tokens in all. Raises SpecError naming cu_seqlens_q."""
    try:
        check_cu_seqlens(cu_seqlens_q, tokens if max_len_q is None else max_len_q, side="q", tokens=tokens)
    except SpecError as error:
        # In a paged call the offsets are an argument of their own, not a part of seq_info.
        raise type(error)(str(error).removeprefix("seq_info.")) from None


def check_starts(kv_starts: np.ndarray, seq_lens: np.ndarray) -> None:
    """Raises SpecError for a first key on the host that is negative or behind the end of its sequence."""
    check_within("kv_starts", kv_starts, seq_lens, ", the length of the sequence")


def check_slots(slots: np.ndarray, name: str = "block_table") -> None:
    """Raises SpecError if two tokens would be written to one slot. -1, which is never written, may repeat."""
    written = slots[slots >= 0]
    values, counts = np.unique(written, return_counts=True)
    if (counts > 1).any():
        slot = int(values[np.argmax(counts > 1)])
        raise SpecError(
            f"{name}: expected a separate slot for each new token, but slot {slot} would be written "
            f"{int(counts.max())} times; copy a shared page before a sequence writes to it"
        )


def check_table_types(name: str, dtype: str, shape: tuple[int, ...], expected: tuple[int | str, ...]) -> None:
    """Raises DTypeError or ShapeError unless a table is int32, or int64, of a shape; a text stands for any length."""
    if dtype not in ("int32", "int64"):
        raise DTypeError(f"{name}: expected dtype int32 or int64, got {dtype}; cast it")
    fits = len(shape) == len(expected) and all(isinstance(e, str) or e == s for e, s in zip(expected, shape))
    if not fits:
        raise ShapeError(f"{name}: expected shape [{', '.join(map(str, expected))}], got {list(shape)}")


def as_int32(name: str, table: np.ndarray) -> np.ndarray:
    """Returns a table on the host in int32 if it is int64; others are returned as they are.

    Raises:
        SpecError: naming the table and a value that int32 does not have.
    """
    if table.dtype != np.int64:
        return table
    limit = np.iinfo(np.int32)
    if table.size and (table.min() < limit.min or table.max() > limit.max):
        at = np.argwhere((table < limit.min) | (table > limit.max))[0].tolist()
        raise SpecError(f"{name}{at}={int(table[tuple(at)])}: expected {limit.min} to {limit.max}, a value of int32")
    return table.astype(np.int32)


def last_places(rows: list[list[int]], lengths: list[int], page_size: int) -> list[tuple[int, int]]:
    """Returns the page, and the offset in it, of each sequence's last token; for short tables as ``are_valid``."""
    return [(row[(length - 1) // page_size], (length - 1) % page_size) for row, length in zip(rows, lengths)]


def positions_of(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray | None) -> np.ndarray:
    """Returns int64 ``[tokens]``: each new token's position in its sequence, whose last tokens are the new ones.

    Args:
        cu_seqlens_q: the offsets of the new tokens; None if each sequence has one.
    """
    lengths = np.asarray(seq_lens, np.int64)
    if cu_seqlens_q is None:
        return lengths - 1
    cu = np.asarray(cu_seqlens_q, np.int64)
    sequence = np.repeat(np.arange(len(cu) - 1), np.diff(cu))  # of each new token
    # Counted from the end: the last new token of a sequence is at position seq_lens - 1.
    return np.arange(cu[-1]) - cu[sequence + 1] + lengths[sequence]


def slots_of(block_table: np.ndarray, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray, page_size: int) -> np.ndarray:
    """Returns int64 ``[tokens]``: each new token's slot. A sequence's new tokens are the last of its ``seq_lens``."""
    cu = np.asarray(cu_seqlens_q, np.int64)
    sequence = np.repeat(np.arange(len(cu) - 1), np.diff(cu))  # of each new token
    position = positions_of(seq_lens, cu)
    # In int64, because a pool can have more than 2**31 - 1 slots.
    return np.asarray(block_table, np.int64)[sequence, position // page_size] * page_size + position % page_size


class Written(NamedTuple):
    """The tokens that an append writes.

    Attributes:
        tokens: their index among the new ones.
        places: int64 ``[2, written]``: the page, and the offset in it, of each.
        positions: of each in its sequence; None without rotary, and if nothing on the host says them.
    """

    tokens: slice | np.ndarray
    places: np.ndarray
    positions: np.ndarray | None


def check_read(spec: AttentionSpec, max_len_q: int | None, values: Values) -> bool:
    """Checks the tables, key ranges, first keys and scales of a paged call. Returns whether it checked the tables.

    Args:
        max_len_q: the most queries of a sequence; None: as many as there are tokens.

    Raises:
        SpecError: naming the array, the wrong value and what was expected.
    """
    assert spec.paged is not None
    ranges, starts, lengths = (values.get(name) for name in ("key_ranges", "kv_starts", "seq_lens"))
    table, has_tables = values.get("block_table"), all(name in values for name in TABLES)
    if has_tables and table is not None and lengths is not None:
        check_values(spec.paged, spec.q_len, max_len_q, table, lengths, values["cu_seqlens_q"])
    if ranges is not None:
        key_ranges.check_values(ranges, spec.q_len)
    if starts is not None and lengths is not None:
        check_starts(starts, lengths)
    scales = {name: values.get(name) for name in SCALES}
    has_scales = "kv_starts" in values and not any(each is None for each in scales.values())
    if has_tables and has_scales and table is not None and lengths is not None:
        # The keys before a sequence's first visible one are not read.
        counts = lengths if starts is None else lengths - starts
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        check_used_scales(scales, slots_of(table, lengths, offsets, spec.paged.page_size), spec.paged.page_size)
    return has_tables


def places_of_append(tokens: int, pool: tuple[int, int], values: Values, max_positions: int | None) -> Written | None:
    """Checks the tables or slots of an append, its positions and its scales by page. None without values on the host.

    Args:
        tokens: of k and v. pool: the pages and their size.
        max_positions: the rows of cos and sin; None without rotary.

    Raises:
        SpecError: naming the array, the wrong value and what was expected.
    """
    slots, positions = values.get("slot_mapping"), values.get("positions")
    written: slice | np.ndarray
    if slots is not None:
        check_slot_values(slots, *pool)
        written = np.flatnonzero(slots >= 0)
        slots = slots[written].astype(np.int64)
    else:
        table, lengths = values.get("block_table"), values.get("seq_lens")
        if table is None or lengths is None or not values.keys() >= {"slot_mapping", *TABLES}:
            return None
        cu = values["cu_seqlens_q"]
        paged = PagedKV(num_pages=pool[0], page_size=pool[1], width=table.shape[1])
        check_values(paged, tokens, None, table, lengths, cu, writes=True)
        # An index assignment with a repeated slot would write either token, without an error; so slots are checked.
        slots = slots_of(table, lengths, np.arange(len(lengths) + 1) if cu is None else cu, pool[1])
        check_slots(slots)
        written = slice(len(slots))  # tokens behind the last offset belong to no sequence
        if max_positions is not None and positions is None and "positions" in values:
            _check_lengths_have_angles(lengths, cu, max_positions)
            positions = positions_of(lengths, cu)
    if positions is not None and max_positions is not None:
        positions = positions[written]
        rotary.check_position_values(positions, max_positions)
    scales = {name: array for name in SCALES if (array := values.get(name)) is not None and array.ndim == 2}
    check_used_scales(scales, slots, pool[1])
    return Written(written, np.stack(np.divmod(slots, pool[1])), positions)


def check_slot_values(slots: np.ndarray, num_pages: int, page_size: int) -> None:
    """Checks slots on the host. Raises SpecError for one outside of the pool, or for two tokens in one slot."""
    if (wrong := (slots < -1) | (slots >= num_pages * page_size)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"slot_mapping[{at}]={int(slots[at])}: expected 0 to {num_pages * page_size - 1}, because the pool has "
            f"{num_pages} pages of {page_size}, or -1 for a token that is not written"
        )
    check_slots(slots, "slot_mapping")


def pages_and_offsets(slots: np.ndarray, page_size: int) -> np.ndarray:
    """Returns int32 ``[2, tokens]``: each slot's page and the offset in it; page -1 for a slot below 0."""
    # A pool may have more than 2**31 - 1 slots, but no more pages.
    return np.stack(np.divmod(slots.astype(np.int64), page_size)).astype(np.int32)


def _check_lengths_have_angles(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray | None, max_positions: int) -> None:
    """Raises SpecError for a sequence on the host whose new tokens lie behind the last row of cos and sin."""
    lengths = np.asarray(seq_lens)
    grows = np.ones(len(lengths), bool) if cu_seqlens_q is None else np.diff(cu_seqlens_q) > 0
    if (wrong := grows & (lengths > max_positions)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"seq_lens[{at}]={int(lengths[at])}: expected at most {max_positions} tokens, because cos and sin of "
            f"rotary have {max_positions} positions"
        )
