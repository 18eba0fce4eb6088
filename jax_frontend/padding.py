"""unpad and repad: from a padded batch of JAX arrays to packed documents, and back."""

from __future__ import annotations

from typing import Any, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.padding import Padding, check_batch, check_packed, kept
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import SpecError
from jax_frontend.dispatch.plan import check_array

Array = jax.Array
Tensors = TypeVarTuple("Tensors")


def unpad(attention_mask: Array | np.ndarray, *tensors: *Tensors, total: int | None = None) -> tuple[*Tensors, Padding]:
    """Takes the padding out of a batch: what remains is one row of packed documents, one for each row of the batch.

    ``q, k, v, padding = unpad(attention_mask, q, k, v)``, then ``attention(..., seq_info=padding.seq_info)``. Call it
    once for a batch, with embeddings and positions for a whole model. Distances (window, ALiBi) count the tokens that
    remain, which differs from a mask only if a row has holes.

    Args:
        attention_mask: bool or int ``[batch, length]``: True or 1 is a token, False or 0 is padding, at any place. If
            it is traced, any other number is a token, too, and ``total`` is needed.
        tensors: ``[batch, length, ...]`` each.
        total: the tokens of the packed row, if all batches are to have equally many. Those behind the last document
            are 0, and ``length`` counts as the longest document, so that a compiled program serves every batch. If a
            traced mask has more, the last ones are lost, or a kernel raises an error about ``seq_info``, as with wrong
            offsets; ``attn_core.checks`` warns.

    Returns:
        Each array as ``[1, tokens, ...]``, with a gradient, and the ``Padding`` for ``repad``.

    Raises:
        ShapeError, DTypeError, SpecError, TypeError: naming the argument.
    """
    if not isinstance(attention_mask, np.ndarray):
        check_array("attention_mask", attention_mask)
    given: tuple[Any, ...] = tensors
    for number, tensor in enumerate(given):
        check_array(f"tensors[{number}]", tensor)
    check_batch(attention_mask, given, total)
    if isinstance(attention_mask, jax.core.Tracer):
        padding = _traced(attention_mask, total)
    else:
        seq_info, places = kept(np.asarray(attention_mask), total)
        padding = Padding(seq_info, jnp.array(places.astype(np.int32)), attention_mask)
    flat = [tensor.reshape(attention_mask.size, *tensor.shape[2:]) for tensor in given]
    rows: Any = [row.at[padding.indices].get(mode="fill", fill_value=0)[None] for row in flat]
    return (*rows, padding)  # type: ignore[return-value]


def _traced(attention_mask: Array, total: int | None) -> Padding:
    """Returns the ``Padding`` of a mask whose values a program learns when it runs."""
    if total is None:
        raise SpecError(
            "attention_mask: expected values on the host, got a tracer, because the number of tokens is a shape; pass "
            "total=, the tokens of the packed row, or keep the batch as it is with q_segment_ids= or, padded on the "
            "right, kv_lengths= and alignment='top_left'"
        )
    keep = attention_mask != 0
    ends = jnp.cumsum(keep.sum(1, dtype=jnp.int32), dtype=jnp.int32)
    offsets, longest = jnp.pad(ends, (1, 0)), keep.shape[1]
    (indices,) = jnp.nonzero(keep.ravel(), size=total, fill_value=keep.size)
    return Padding(SeqInfo(offsets, offsets, longest, longest), indices.astype(jnp.int32), attention_mask)


def repad(packed: Array, padding: Padding) -> Array:
    """Puts packed tokens back into the batch that ``unpad`` took them from; padding is 0.

    Args:
        packed: ``[1, tokens, ...]``, such as an output of attention or of a whole model.
        padding: of ``unpad``.

    Returns:
        ``[batch, length, ...]``, with a gradient.

    Raises:
        ShapeError, SpecError, TypeError: naming the argument.
    """
    check_array("packed", packed)
    check_packed(packed, padding)
    check_array("padding.indices", padding.indices)
    batch, length = padding.attention_mask.shape
    places = jnp.zeros((batch * length, *packed.shape[2:]), packed.dtype)
    return places.at[padding.indices].set(packed[0], mode="drop").reshape(batch, length, *packed.shape[2:])
