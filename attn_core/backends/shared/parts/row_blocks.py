"""Blocks of query rows and the keys that they may see, for attention written in torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from attn_core.backends.shared.parts.split_documents import DocumentSlices, documents
from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

MOST_TABLES = 16
"""The most tables of hidden pairs in memory: blocks with equal distances share them."""


class RowBlock(NamedTuple):
    """A block of query rows and the keys that any of them may see; both slices count the tokens of the whole row.

    distance: int64 ``[rows, keys]``, how far right of the diagonal each key lies; None if no ALiBi slopes need it.
    hidden: bool ``[rows, keys]``, True for pairs that band and documents hide; None if they hide nothing.
    shades: the parts of the keys, counted from the block's first, that hold all pairs that the band hides, each with a
        float32 table that is -inf for hidden pairs and 0 for others; None for packed documents on CUDA.
    """

    rows: slice
    keys: slice
    distance: Any
    hidden: Any
    shades: tuple[tuple[slice, Any], ...] | None = None


def blocks(
    spec: AttentionSpec, inputs: Inputs, height: int, valid_documents: list[DocumentSlices] | None = None
) -> Iterator[RowBlock]:
    """Yields the blocks of a call, each of at most ``height`` rows. Rows in no block see no key.

    Args:
        valid_documents: of a packed call on the CPU; None to check the offsets and split the row here.
    """
    if spec.packed and inputs.q.device.type != "cpu":
        return _token_blocks(spec, inputs, height)
    return _host_blocks(spec, inputs, height, valid_documents)


def _host_blocks(
    spec: AttentionSpec, inputs: Inputs, height: int, valid_documents: list[DocumentSlices] | None
) -> Iterator[RowBlock]:
    import torch

    device = inputs.q.device
    tables: dict[Any, tuple[Any, Any]] = {}
    # A GPU would have to wait for the values, and a fake tensor has none.
    has_values = inputs.key_ranges is not None and inputs.key_ranges.is_cpu and type(inputs.key_ranges) is torch.Tensor
    for queries, keys, edge in _documents(spec, inputs, valid_documents):
        for start in range(queries.start, queries.stop, height):
            stop = min(start + height, queries.stop)
            first, last = edge.keys_of(start, stop - 1, keys.stop)
            first = max(first, keys.start)
            if has_values and first < last:
                first, last = _keys_in_ranges(inputs.key_ranges, start, stop, first, last)
            if first >= last:  # the band shows no key to any of these rows
                continue
            distance = None
            if spec.alibi_shape:
                rows = torch.arange(start, stop, device=device)[:, None]
                distance = torch.arange(first, last, device=device) - (rows + edge.offset)
            hidden, shades = _hidden(edge, start, stop, first, last, device, tables)
            yield RowBlock(slice(start, stop), slice(first, last), distance, hidden, shades)


def _keys_in_ranges(key_ranges: Any, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """Returns the first key from first to last that a row from start to stop sees in its ranges, and the one after the
    last; two equal numbers if there is none."""
    starts, stops = key_ranges[:, :, first:last].unbind(-1)
    meets = ((starts < stop) & (stops > start) & (starts < stops)).permute(2, 0, 1, 3).flatten(1).any(1)
    keys = meets.nonzero()
    return (first + int(keys[0]), first + int(keys[-1]) + 1) if len(keys) else (first, first)


def _hidden(
    edge: Band, start: int, stop: int, first: int, last: int, device: Any, tables: dict[Any, tuple[Any, Any]]
) -> tuple[Any, tuple[tuple[slice, Any], ...] | None]:
    """Returns ``RowBlock.hidden`` and ``RowBlock.shades`` of rows from start to stop and keys from first to last.

    Args:
        tables: the tables of earlier blocks, which depend on distances only.
    """
    import torch

    if edge.contains(start, last - 1) and edge.contains(stop - 1, first):  # the block's far corners
        return None, None
    shades = []
    hidden = torch.zeros(stop - start, last - first, dtype=torch.bool, device=device)
    for begin, end in _cut(edge, start, stop, first, last):
        where = stop - start, begin - start, end - start, edge.offset, edge.left, edge.right
        if where not in tables:
            rows, columns = torch.arange(start, stop, device=device)[:, None], torch.arange(begin, end, device=device)
            table = ~edge.contains(rows, columns)
            shade = torch.zeros(table.shape, dtype=torch.float32, device=device).masked_fill_(table, float("-inf"))
            if len(tables) >= MOST_TABLES:
                tables.clear()
            tables[where] = table, shade
        part = slice(begin - first, end - first)
        hidden[:, part], shade = tables[where]
        shades.append((part, shade))
    return hidden, tuple(shades)


def _cut(edge: Band, start: int, stop: int, first: int, last: int) -> list[tuple[int, int]]:
    """Returns the keys that the band hides from some row: the first and the one after the last of each part."""
    # Every row sees the keys from left, the first of the last row, to right, the end of the first row.
    left = first if edge.left is None else max(first, stop - 1 + edge.offset - edge.left)
    right = last if edge.right is None else min(last, start + edge.offset + edge.right + 1)
    if right <= left:
        return [(first, last)]
    return [ends for ends in ((first, left), (right, last)) if ends[0] < ends[1]]


def _documents(
    spec: AttentionSpec, inputs: Inputs, valid_documents: list[DocumentSlices] | None
) -> Iterator[tuple[slice, slice, Band]]:
    """Yields query tokens, key tokens and band of each document; the band's offset counts tokens of the whole row."""
    if not spec.packed:
        yield slice(0, spec.q_len), slice(0, spec.kv_len), band(spec)
        return
    if valid_documents is None:
        valid_documents = documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy())
    for rows, keys in valid_documents:
        edge = band(spec, rows.stop - rows.start, keys.stop - keys.start)
        yield rows, keys, edge._replace(offset=edge.offset + keys.start - rows.start)


def _token_blocks(spec: AttentionSpec, inputs: Inputs, height: int) -> Iterator[RowBlock]:
    """Yields blocks of packed tokens without reading their offsets on the host, so each block spans all keys."""
    import torch

    cu_q, cu_k = inputs.cu_seqlens_q.long(), inputs.cu_seqlens_k.long()
    of_query, at_query = _token_positions(cu_q, spec.q_len)
    of_key, at_key = _token_positions(cu_k, spec.kv_len)
    documents = cu_q.shape[0] - 1
    if spec.alignment == "bottom_right":  # count each query's position along the keys
        offsets = cu_k.diff() - cu_q.diff()
        at_query = at_query + offsets[of_query.clamp(max=documents - 1)]
    edge = band(spec)._replace(offset=0)
    for start in range(0, spec.q_len, height):
        rows = slice(start, min(start + height, spec.q_len))
        document, position = of_query[rows, None], at_query[rows, None]
        same = (document == of_key) & (document < documents)  # tokens past the last offset belong to no document
        hidden = torch.logical_not(same & edge.contains(position, at_key))
        yield RowBlock(rows, slice(0, spec.kv_len), at_key - position, hidden)


def _token_positions(cu_seqlens: Any, tokens: int) -> tuple[Any, Any]:
    """Returns each token's document (the number of documents for a token in none) and its position there, int64."""
    import torch

    token = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return document, token - cu_seqlens[document]
