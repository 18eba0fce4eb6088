"""append_kv: writes the keys and values of new tokens into pages, for JAX arrays."""

from __future__ import annotations

from typing import Any, Never

import jax
import jax.numpy as jnp

from attn_core.backends.shared.jax_offsets import document_numbers
from attn_core.backends.shared.jax_promotion import usual_promotion
from attn_core.call.arguments import ArrayFacts
from attn_core.call.foreign_keywords import hide_unknown, refuse_keywords
from attn_core.paged import arguments
from jax_frontend.dispatch import plan
from jax_frontend.paged.quantise import write
from jax_frontend.paged.tables import check_kinds, check_page_scales, check_table_values, copy_numpy

Array = jax.Array


@hide_unknown
def append_kv(
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    **unknown: Never,
) -> tuple[Array, ...]:
    """Writes the keys and values of new tokens into their sequences' pages, and returns the updated pool.

    Args:
        k_pages, v_pages: the pool, as in ``paged_attention``. Outside of jit they are donated: JAX reuses their memory
            and deletes the arrays that you passed. Inside your own jit, donate them there.
        k, v: ``[tokens, kv_heads, dim]``, in the pool's dtype: the last tokens of each sequence, end to end. For
            quantised pages in bfloat16, float16 or float32.
        block_table, seq_lens, cu_seqlens_q: as in ``paged_attention``; ``seq_lens`` count the new tokens.
        k_scales, v_scales: the scales of quantised pages, as in ``paged_attention``. Scales by token are written and
            donated, too: each becomes the largest magnitude of its token and head, divided by the largest stored
            number, and NaN for a token with NaN or Inf. Scales by page are read: numbers beyond them saturate.

    Returns:
        ``(k_pages, v_pages)``, the updated pool; with scales ``(k_pages, v_pages, k_scales, v_scales)``.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and for tables on the host with a page
            outside of the pool or one slot for two tokens. With tables elsewhere, a token without a valid slot is not
            written.
    """
    if unknown:
        refuse_keywords("append_kv", unknown)
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages), ("k", k), ("v", v)):
        plan.check_array(name, array)
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    for name, each in scales.items():
        if each is not None:
            plan.check_array(name, each)
    check_kinds(block_table, seq_lens, cu_seqlens_q)
    named = {"k_pages": k_pages, "v_pages": v_pages, **scales, "k": k, "v": v}
    tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    device = plan.device_name(k_pages)
    everything = {**named, **tables}
    arguments.check_append(
        {n: None if a is None else ArrayFacts(a.shape, str(a.dtype), device) for n, a in everything.items()}
    )
    check_table_values(None, k.shape[0], k_pages.shape, block_table, seq_lens, cu_seqlens_q, writes=True)
    check_page_scales(scales, k_pages.shape[1], block_table, seq_lens, cu_seqlens_q)
    arrays: list[Any] = [copy_numpy(array) for array in everything.values()]
    # Under the caller's jit the donation is the caller's choice, so only an eager call donates the pool here.
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    by_page = k_scales is not None and k_scales.ndim == 2
    run = _append if traced else _append_by_page if by_page else _append_donated
    return tuple(array for array in run(*arrays) if array is not None)


def _append(
    k_pages: Array,
    v_pages: Array,
    k_scales: Any,
    v_scales: Any,
    k: Array,
    v: Array,
    table: Array,
    lengths: Array,
    cu: Any,
) -> Any:
    num_pages, page_size, batch = *k_pages.shape[:2], table.shape[0]
    if k.shape[0] == 0 or table.shape[1] == 0:  # nothing to write, and an axis of size 0 has no valid index
        return k_pages, v_pages, k_scales, v_scales
    token = jnp.arange(k.shape[0], dtype=jnp.int32)  # as the tables; under x64 it would be int64
    ends = token + 1 if cu is None else cu[1:]  # where each sequence's new tokens end
    sequence = document_numbers(ends, k.shape[0])
    owned, sequence = sequence < batch, jnp.minimum(sequence, batch - 1)
    position = lengths[sequence] - (ends[sequence] - token)
    page = table[sequence, jnp.clip(position // page_size, 0, table.shape[1] - 1)]
    inside = owned & (position >= 0) & (position < table.shape[1] * page_size) & (page >= 0) & (page < num_pages)
    page = jnp.where(inside, page, num_pages)  # mode="drop" skips pages past the end of the pool
    places = page, position % page_size
    with usual_promotion():
        k_pages, k_scales = write(k_pages, k_scales, places, k)
        v_pages, v_scales = write(v_pages, v_scales, places, v)
    return k_pages, v_pages, k_scales, v_scales


_append_donated = jax.jit(_append, donate_argnums=(0, 1, 2, 3))  # without donation every append would copy the pool
_append_by_page = jax.jit(_append, donate_argnums=(0, 1))  # scales by page are the caller's, and do not change
