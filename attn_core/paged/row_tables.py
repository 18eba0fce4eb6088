"""Block tables in CSR (``indptr``, ``indices``, ``last_page_len``), which FlashInfer has: conversions and checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.call.kinds import MOST, check_size
from attn_core.call.seq_info import is_number
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.allocation.allocator import UNUSED
from attn_core.paged.arguments import check_one_place
from attn_core.paged.tables import check_table_types


class PagedRows(NamedTuple):
    """A block table by rows laid end to end (CSR), which some kernels require; int32.

    Attributes:
        indptr: ``[batch + 1]``: row b's pages are ``indices[indptr[b] : indptr[b + 1]]``.
        indices: the pages in use.
        last_page_len: ``[batch]``: tokens in the last page of each row, 1 to page_size; 0 for an empty row.
    """

    indptr: np.ndarray
    indices: np.ndarray
    last_page_len: np.ndarray


def rows_of_table(block_table: np.ndarray, seq_lens: np.ndarray, page_size: int) -> PagedRows:
    """Returns the table as CSR, with only the pages that a row's tokens fill."""
    lengths = np.asarray(seq_lens, np.int64)
    counts = -(-lengths // page_size)
    # np.concatenate refuses an empty list, which a batch of 0 would give.
    indices = np.concatenate([row[:count] for row, count in zip(block_table, counts)] or [np.zeros(0, np.int32)])
    # A full last page has page_size tokens; the plain remainder would be 0.
    last = np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return PagedRows(indptr.astype(np.int32), indices.astype(np.int32), last.astype(np.int32))


def table_of_rows(rows: PagedRows, page_size: int, width: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (block_table, seq_lens) of a table in CSR: the inverse of ``rows_of_table``."""
    counts = np.diff(rows.indptr)
    columns = int(counts.max(initial=0)) if width is None else width
    table = np.full((len(counts), columns), UNUSED, np.int32)
    for row, start, count in zip(table, rows.indptr, counts):
        row[:count] = rows.indices[start : start + count]
    lengths = np.where(counts > 0, (counts - 1) * page_size + rows.last_page_len, 0)
    return table, lengths.astype(np.int32)


def check_rows(indptr: np.ndarray, indices: np.ndarray, last_page_len: np.ndarray, page_size: int, width: int) -> None:
    """Checks the values of a table in CSR, which is on the host, for ``table_of_rows`` of a fixed width.

    Raises:
        SpecError: for offsets that do not start at 0, decrease or end beyond the indices; for a row with more than
            ``width`` pages; for a last page with fewer than 1 or more than ``page_size`` tokens.
    """
    counts = np.diff(indptr.astype(np.int64))  # the difference of two int32 may wrap
    if len(indptr) and (indptr[0] != 0 or (counts < 0).any() or indptr[-1] > len(indices)):
        raise SpecError(
            f"indptr={list(map(int, indptr[:12]))}: expected offsets from 0 that never decrease and end at most at "
            f"{len(indices)}, the number of indices"
        )
    if (counts > width).any():
        at = int(np.argmax(counts > width))
        raise SpecError(f"width={width}: expected at least {counts[at]}, the pages of row {at}")
    if (wrong := (counts > 0) & ((last_page_len < 1) | (last_page_len > page_size))).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"last_page_len[{at}]={int(last_page_len[at])}: expected 1 to {page_size} tokens in the last page of a row"
        )


def check_row_types(named: dict[str, ArrayFacts], page_size: Any, width: Any) -> None:
    """Checks the dtypes and shapes of a table in CSR, and its sizes.

    Args:
        named: indptr, indices and last_page_len, by name.

    Raises:
        DTypeError, ShapeError, DeviceError: naming the argument.
    """
    check_one_place(dict(named), "indptr")
    indptr = named["indptr"].shape
    batch = max(indptr[0] - 1, 0) if len(indptr) == 1 else "batch"
    expected = {"indptr": ("batch + 1",), "indices": ("pages in use",), "last_page_len": (batch,)}
    for name, facts in named.items():
        if facts.dtype != "int32":
            raise DTypeError(f"{name}: expected dtype int32, got {facts.dtype}; cast it")
        check_table_types(name, facts.dtype, facts.shape, expected[name])
    if indptr[0] == 0:
        raise ShapeError("indptr: expected shape [batch + 1], got [0]")
    if is_number(most := named["indices"].shape[0]) and most > MOST:
        raise ShapeError(f"indices: expected at most {MOST} pages, because offsets are int32, got {most}")
    check_size("page_size", page_size, 1)
    check_size("width", width, 0)
    if page_size * width > MOST:
        raise ShapeError(f"page_size={page_size} * width={width}: expected at most {MOST} tokens in a row")
