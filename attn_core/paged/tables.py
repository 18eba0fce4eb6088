"""The tables of keys and values in pages, as numpy arrays: checks of tables that are on the host, and slots.

``k_pages`` and ``v_pages`` are ``[num_pages, page_size, kv_heads, dim]``. Row b of ``block_table`` (int32, ``[batch,
width]``) has the pages of sequence b in the order of its tokens, then -1. ``seq_lens`` (int32, ``[batch]``) has the
tokens of each sequence, including the tokens of the call's queries. A slot has room for one token; its number is
``page * page_size + offset``.
"""

from __future__ import annotations

import numpy as np

from attn_core.call.offset_checks import check_cu_seqlens
from attn_core.call.pages import PagedKV
from attn_core.errors import DTypeError, ShapeError, SpecError


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
        writes: see ``check_tables``.

    Raises:
        SpecError: naming the table, the wrong value and what was expected.
    """
    if cu_seqlens_q is not None:
        check_offsets(cu_seqlens_q, tokens, max_len_q)
    check_tables(paged, block_table, seq_lens, cu_seqlens_q, writes=writes)


def check_tables(
    paged: PagedKV,
    block_table: np.ndarray,
    seq_lens: np.ndarray,
    cu_seqlens_q: np.ndarray | None,
    *,
    writes: bool = False,
) -> None:
    """Checks the values of a call's tables, which are on the host.

    Args:
        cu_seqlens_q: the offsets of the queries, already checked; None if each sequence has one query.
        writes: whether the keys of the queries will be written, so that each needs a slot.

    Raises:
        SpecError: for lengths below 0 or beyond the table, pages outside the pool, and, for writes, fewer tokens than
            queries.
    """
    lengths = np.asarray(seq_lens, np.int64)
    # The lengths come first, because the check of pages below takes from them which entries are used.
    check_lengths(paged, lengths)
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


def check_lengths(paged: PagedKV, lengths: np.ndarray) -> None:
    """Raises SpecError for a negative length, or for one that exceeds the pages of a row of the table."""
    if (wrong := (lengths < 0) | (lengths > paged.capacity)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"seq_lens[{at}]={lengths[at]}: expected 0 to {paged.capacity} tokens, because the block table has "
            f"{paged.width} pages of {paged.page_size} for each sequence"
        )


def check_starts(kv_starts: np.ndarray, seq_lens: np.ndarray) -> None:
    """Raises SpecError for a first key on the host that is negative or behind the end of its sequence."""
    if (wrong := (kv_starts < 0) | (kv_starts > seq_lens)).any():
        at = int(np.argmax(wrong))
        raise SpecError(f"kv_starts[{at}]={kv_starts[at]}: expected 0 to {seq_lens[at]}, the length of the sequence")


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
