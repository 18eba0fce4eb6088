"""Packed documents read on the host: each document's query and key tokens, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.seq_info import check_cu_seqlens
from attn_core.spec import AttentionSpec


class Document(NamedTuple):
    """The tokens of one document, as slices of the whole row."""

    rows: slice
    keys: slice

    @property
    def lengths(self) -> tuple[int, int]:
        """How many queries and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start


def documents(spec: AttentionSpec, cu_seqlens_q: Any, cu_seqlens_k: Any) -> list[Document]:
    """The documents that have a query and a key, in order; any other row sees nothing.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 numpy arrays ``[documents + 1]``.

    Raises:
        ShapeError, SpecError: for offsets that would read outside the row, before anything is read.
    """
    limits = {
        "q": spec.q_len if spec.max_len_q is None else spec.max_len_q,
        "k": spec.kv_len if spec.max_len_k is None else spec.max_len_k,
    }
    check_cu_seqlens(cu_seqlens_q, limits["q"], side="q", tokens=spec.q_len)
    check_cu_seqlens(cu_seqlens_k, limits["k"], side="k", tokens=spec.kv_len)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    found = []
    for index in range(len(ends_q) - 1):
        document = Document(slice(ends_q[index], ends_q[index + 1]), slice(ends_k[index], ends_k[index + 1]))
        if all(document.lengths):
            found.append(document)
    return found
