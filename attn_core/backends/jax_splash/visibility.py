"""What each query sees, as splash attention takes it: a function of positions, and numbers of documents.

splash calls ``mask_function(queries, keys)`` inside its kernels, for the positions of a block. ``keys`` count the row's
keys; ``queries`` are the numbers of ``MaskInfo.q_sequence``. For a dense call these count the queries, and the function
moves them to the diagonal. For packed documents they are the keys on the diagonals, which only the device knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.in_jax.offsets import document_numbers, safe_offsets
from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


@dataclass(frozen=True)
class InBand:
    """A mask function of splash: whether queries see keys by a band, among the first ``kv_len`` keys.

    Plain data with equality, because JAX caches the kernel's trace by it.
    """

    edge: Band
    kv_len: int

    def __call__(self, queries: Any, keys: Any) -> Any:
        """Returns booleans that broadcast to the common shape of the positions, in their framework."""
        exists = keys < self.kv_len
        inside = self.edge.contains(queries, keys)
        return exists if inside is True else exists & inside


@cached_once
def mask_class() -> Any:
    """Returns a class of splash masks of an ``InBand``: splash looks at its blocks while JAX traces."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

    class BandMask(splash_attention_mask.Mask):
        """A splash mask of the given padded lengths."""

        def __init__(self, shape: tuple[int, int], mask_function: InBand) -> None:
            self._shape, self.mask_function = shape, mask_function
            self.q_sequence = np.arange(shape[0], dtype=np.int32)

        @property
        def shape(self) -> tuple[int, int]:
            return self._shape

        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            queries, keys = self.q_sequence[index[0]], np.arange(self._shape[1], dtype=np.int32)[index[1]]
            return np.broadcast_to(self.mask_function(queries[:, None], keys[None, :]), (len(queries), len(keys)))

        def __eq__(self, other: object) -> bool:
            return isinstance(other, BandMask) and self._key == other._key

        def __hash__(self) -> int:
            return hash(self._key)

        @property
        def _key(self) -> tuple[Any, ...]:
            return self._shape, self.mask_function

    return BandMask


class PackedRows(NamedTuple):
    """Packed documents for splash, as JAX arrays.

    Attributes:
        diagonal: int32 ``[padded q_len]``, the key on each query's diagonal, counted in the row.
        queries, keys: int32 ``[padded q_len]`` and ``[padded kv_len]``, the document of each token; a token sees tokens
            of equal numbers only. Queries and keys without a document have numbers that no other token has.
        sees_key: bool ``[q_len]``, whether a query sees any key.
    """

    diagonal: Any
    queries: Any
    keys: Any
    sees_key: Any


def packed_rows(spec: AttentionSpec, inputs: Inputs, padded: tuple[int, int]) -> PackedRows:
    """Returns what splash needs to know about packed documents. Traceable; wrong offsets stay within the row."""
    import jax.numpy as jnp

    cu_q = safe_offsets(inputs.cu_seqlens_q, spec.q_len, whole=False)
    cu_k = safe_offsets(inputs.cu_seqlens_k, spec.kv_len, whole=False)
    documents = cu_q.shape[0] - 1
    of_query, of_key = document_numbers(cu_q[1:], spec.q_len), document_numbers(cu_k[1:], spec.kv_len)
    first, stop = cu_k[of_query], cu_k[jnp.minimum(of_query + 1, documents)]
    position = jnp.arange(spec.q_len, dtype=jnp.int32) - cu_q[of_query]
    if spec.alignment == "bottom_right":
        next_query = cu_q[jnp.minimum(of_query + 1, documents)]
        position = position + (stop - first) - (next_query - cu_q[of_query])
    diagonal, edge = first + position, band(spec)
    lowest = first if edge.left is None else jnp.maximum(first, diagonal - edge.left)
    highest = stop if edge.right is None else jnp.minimum(stop, diagonal + edge.right + 1)
    of_key = jnp.where(of_key < documents, of_key, documents + 1)
    more_queries, more_keys = padded[0] - spec.q_len, padded[1] - spec.kv_len
    return PackedRows(
        diagonal=jnp.pad(diagonal, (0, more_queries)),
        queries=jnp.pad(of_query, (0, more_queries), constant_values=documents),
        keys=jnp.pad(of_key, (0, more_keys), constant_values=documents + 1),
        sees_key=(of_query < documents) & (lowest < highest),
    )


def rows_that_see(spec: AttentionSpec) -> np.ndarray | None:
    """Returns which queries of a dense call see a key, bool ``[q_len]``; None if all do."""
    edge = band(spec)
    if not edge.empties_a_row(spec.q_len, spec.kv_len):
        return None
    diagonal = np.arange(spec.q_len) + edge.offset
    first = 0 if edge.left is None else np.maximum(0, diagonal - edge.left)
    stop = spec.kv_len if edge.right is None else np.minimum(spec.kv_len, diagonal + edge.right + 1)
    return np.broadcast_to(first < stop, diagonal.shape)
