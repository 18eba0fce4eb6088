"""Dense calls whose mask shows the pairs of groups of tokens: the same calls on packed documents, the rows end to end.

Kernels run packed documents without a function and without a table of blocks. Chunks of a fixed size are known from the
function. Ids in an array must be values on the host: only an id whose tokens follow each other is a document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.expressions.recognition import Groups, groups_of

FEW_DOCUMENTS, SHORT_DOCUMENT = 16, 64
"""More documents than the first, of fewer tokens on average than the second, stay a function: a kernel computes at
least a tile of 64 or 128 queries for each document."""


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """A call on packed documents. Equal only to itself.

    Attributes:
        spec: the call, whose row holds the rows of the dense call end to end.
        lengths: of its documents.
        chunk: the tokens of a document but the last one of a row; None for ids.
    """

    spec: AttentionSpec
    lengths: np.ndarray
    chunk: int | None

    @property
    def words(self) -> str:
        """What was recognised, for explanations."""
        what = "equal ids" if self.chunk is None else f"chunks of {self.chunk}"
        return f"{what}, which run as {self.spec.documents} packed documents"

    @property
    def offsets(self) -> np.ndarray:
        """The offsets of the documents, int32 ``[documents + 1]``."""
        return np.append(0, self.lengths.cumsum()).astype(np.int32)


def groups_in(spec: AttentionSpec) -> Groups | None:
    """Returns the groups that a call's mask shows, if its other options mean the same on packed documents."""
    if spec.mask_mod is None or spec.symbolic or spec.empty or spec.packed or spec.q_len != spec.kv_len:
        return None
    # Tables and indices count in the rows of the dense call.
    tables = spec.mask_shape, spec.key_ranges_shape, spec.bias_shape, spec.alibi_shape, spec.score_mod, spec.invariant
    if tables != (None,) * len(tables) or spec.dropout or spec.partial or spec.paged is not None:
        return None
    groups = groups_of(spec.mask_mod)
    if groups is None or groups.chunk is not None:
        return None if spec.aux else groups
    ids = (spec.batch, spec.q_len) if groups.by_row else (spec.q_len,)
    # A lookup outside of its array would read another element.
    return groups if groups.array == 0 and [tuple(entry.shape) for entry in spec.aux] == [ids] else None


@lru_cache(maxsize=1024)
def by_chunks(spec: AttentionSpec) -> GroupedRows | None:
    """Returns a call whose mask shows chunks of a fixed size, on packed documents; None for another call."""
    groups = groups_in(spec)
    if groups is None or groups.chunk is None:
        return None
    whole, rest = divmod(spec.q_len, groups.chunk)
    row = [groups.chunk] * whole + [rest] * (rest > 0)
    return _on_documents(spec, np.array(row * spec.batch), groups.chunk)


def by_ids(spec: AttentionSpec, ids: np.ndarray) -> GroupedRows | None:
    """Returns a call whose mask shows equal ids, on packed documents; None if an id comes back behind another one.

    Args:
        spec: a call whose ``groups_in`` are ids.
        ids: ints ``[batch, tokens]`` or ``[tokens]``, of which the low 32 bits count.
    """
    rows = np.atleast_2d(ids).astype(np.int32)
    starts = np.ones(rows.shape, bool)
    starts[:, 1:] = rows[:, 1:] != rows[:, :-1]
    for row, first in zip(rows, starts, strict=True):
        runs = row[first]
        if len(np.unique(runs)) != len(runs):
            return None
    places = np.flatnonzero(np.broadcast_to(starts, (spec.batch, spec.q_len)))
    return _on_documents(spec, np.diff(np.append(places, spec.batch * spec.q_len)), None)


def _on_documents(spec: AttentionSpec, lengths: np.ndarray, chunk: int | None) -> GroupedRows | None:
    tokens, longest = spec.batch * spec.q_len, int(lengths.max())
    if len(lengths) > max(FEW_DOCUMENTS, tokens // SHORT_DOCUMENT):
        return None
    # Each document has as many queries as keys, so both alignments mean the same; more kernels have this one.
    packed = replace(
        spec,
        batch=1,
        q_len=tokens,
        kv_len=tokens,
        alignment="bottom_right",
        mask_mod=None,
        aux=(),
        documents=len(lengths),
        max_len_q=longest,
        max_len_k=longest,
    )
    return GroupedRows(packed, lengths, chunk)
