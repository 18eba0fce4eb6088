"""Splits a packed call on the host into one dense call per document."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.seq_info import FEW_OFFSETS, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, part_of


class DocumentSlices(NamedTuple):
    """The tokens of one document, as slices of the whole row."""

    rows: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """(number of queries, number of keys)"""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def documents(spec: AttentionSpec, cu_seqlens_q: Any, cu_seqlens_k: Any) -> list[DocumentSlices]:
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
    cu_seqlens_q: Any, cu_seqlens_k: Any, limits: tuple[int, int], tokens: tuple[int, int]
) -> list[DocumentSlices]:
    check_cu_seqlens(cu_seqlens_q, limits[0], side="q", tokens=tokens[0])
    check_cu_seqlens(cu_seqlens_k, limits[1], side="k", tokens=tokens[1])
    return documents_between(cu_seqlens_q, cu_seqlens_k)


def documents_between(cu_seqlens_q: Any, cu_seqlens_k: Any) -> list[DocumentSlices]:
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

    def cut(shape: Any) -> Any:  # [1, heads or 1, q_tokens or 1, kv_tokens or 1]
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
