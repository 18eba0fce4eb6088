"""Blocks of query rows and the keys that they may see, for attention written in torch operations.

A packed call is split on the host into one dense call per document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attn_core.call.masks import Band, band
from attn_core.call.seq_info import FEW_OFFSETS, check_cu_seqlens
from attn_core.call.spec import AttentionSpec, Shape4
from attn_core.call.tensors import Inputs, part_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class DocumentSlices(NamedTuple):
    """The tokens of one document, as slices of the whole row."""

    rows: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """(number of queries, number of keys)"""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def documents(spec: AttentionSpec, cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray) -> list[DocumentSlices]:
    """Checks the offsets and returns, in order, the documents that have both queries and keys.

    Queries outside these documents see no key.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 numpy arrays ``[documents + 1]``.

    Raises:
        ShapeError, SpecError: if the offsets lead outside the row.
    """
    limits = (
        spec.q_len if spec.max_len_q is None else spec.max_len_q,
        spec.kv_len if spec.max_len_k is None else spec.max_len_k,
    )
    tokens = (spec.q_len, spec.kv_len)
    few = cu_seqlens_q.size <= FEW_OFFSETS and cu_seqlens_k.size <= FEW_OFFSETS
    if few and cu_seqlens_q.ndim == cu_seqlens_k.ndim == 1 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == np.int32:
        return _known(cu_seqlens_q.tobytes(), cu_seqlens_k.tobytes(), limits, tokens)
    return _checked(cu_seqlens_q, cu_seqlens_k, limits, tokens)


@lru_cache(maxsize=1024)
def _known(cu_seqlens_q: bytes, cu_seqlens_k: bytes, *sizes: tuple[int, int]) -> list[DocumentSlices]:
    """Returns the documents of offsets by their values; every layer of a model asks for the same ones."""
    return _checked(np.frombuffer(cu_seqlens_q, np.int32), np.frombuffer(cu_seqlens_k, np.int32), *sizes)


def _checked(
    cu_seqlens_q: np.ndarray, cu_seqlens_k: np.ndarray, limits: tuple[int, int], tokens: tuple[int, int]
) -> list[DocumentSlices]:
    check_cu_seqlens(cu_seqlens_q, limits[0], side="q", tokens=tokens[0])
    check_cu_seqlens(cu_seqlens_k, limits[1], side="k", tokens=tokens[1])
    return documents_between(cu_seqlens_q, cu_seqlens_k)


def documents_between(cu_seqlens_q: np.ndarray | Tensor, cu_seqlens_k: np.ndarray | Tensor) -> list[DocumentSlices]:
    """Returns the same as ``documents`` for offsets that are known to be valid."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    result = []
    for index in range(len(ends_q) - 1):
        document = DocumentSlices(slice(ends_q[index], ends_q[index + 1]), slice(ends_k[index], ends_k[index + 1]))
        # A document without queries has no result, and one without keys has the results of rows that see no key.
        if all(document.lengths):
            result.append(document)
    return result


@lru_cache(maxsize=4096)
def dense_spec(spec: AttentionSpec, q_len: int, kv_len: int) -> AttentionSpec:
    """Returns the spec of one document of a packed call as a dense call of batch 1."""

    def cut(shape: Shape4 | None) -> Shape4 | None:  # [1, heads or 1, q_tokens or 1, kv_tokens or 1]
        # ``min`` keeps axes of 1, which broadcast.
        return shape and (1, shape[1], min(shape[2], q_len), min(shape[3], kv_len))

    return replace(
        spec,
        q_len=q_len,
        kv_len=kv_len,
        documents=None,
        max_len_q=None,
        max_len_k=None,
        mask_shape=cut(spec.mask_shape),
        bias_shape=cut(spec.bias_shape),
    )


def dense_inputs(inputs: Inputs, document: DocumentSlices) -> Inputs:
    """Returns the tensors of one document as a dense call of batch 1: views of its tokens."""
    rows, keys = document
    # [tokens, heads, dim] -> [1, the document's tokens, heads, dim]
    q, k, v = inputs.q[rows][None], inputs.k[keys][None], inputs.v[keys][None]
    mask, bias = part_of(inputs.mask, rows, keys), part_of(inputs.bias, rows, keys)
    return inputs._replace(q=q, k=k, v=v, mask=mask, bias=bias, cu_seqlens_q=None, cu_seqlens_k=None)


Tables = dict[tuple[int | None, ...], tuple["Tensor", "Tensor"]]
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
    hidden: Tensor | None
    shades: tuple[tuple[slice, Tensor], ...] | None = None


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
    """Yields blocks of at most ``height`` rows of one document, each with the keys that the band shows to some row."""
    import torch

    device = inputs.q.device
    tables: Tables = {}
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


def _keys_in_ranges(key_ranges: Tensor, start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """Returns the first key from first to last that a row from start to stop sees in its ranges, and the one after the
    last; two equal numbers if there is none."""
    starts, stops = key_ranges[:, :, first:last].unbind(-1)
    meets = ((starts < stop) & (stops > start) & (starts < stops)).permute(2, 0, 1, 3).flatten(1).any(1)
    keys = meets.nonzero()
    return (first + int(keys[0]), first + int(keys[-1]) + 1) if len(keys) else (first, first)


def _hidden(
    edge: Band, start: int, stop: int, first: int, last: int, device: torch.device, tables: Tables
) -> tuple[Tensor | None, tuple[tuple[slice, Tensor], ...] | None]:
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


def _token_positions(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns each token's document (the number of documents for a token in none) and its position there, int64."""
    import torch

    token = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], token, right=True)
    return document, token - cu_seqlens[document]
