"""append_kv: writes the keys and values of new tokens into pages, for JAX arrays.

Quantised pages get the numbers that ``attn_core.paged.quantised`` defines.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.backends.shared.in_jax import document_numbers, usual_promotion
from attn_core.call.arguments import ArrayFacts
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.paged import arguments
from attn_core.paged.arguments import check_choice
from attn_core.paged.quantised import STORED, page_factors, stored_numbers, token_scales
from attn_core.paged.rotary import COS, SIN, pair_of
from attn_core.paged.tables import pages_and_offsets, places_of_append
from jax_frontend.dispatch import partitioning, plan
from jax_frontend.paged.rotary import rotate
from jax_frontend.paged.tables import as_operand, checked_tables, copy_numpy, on_host

Array = jax.Array


@hide_unknown
def append_kv(
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    *,
    block_table: Array | np.ndarray | None = None,
    seq_lens: Array | np.ndarray | None = None,
    cu_seqlens_q: Array | np.ndarray | None = None,
    slot_mapping: Array | np.ndarray | None = None,
    rotary: tuple[Array, Array] | None = None,
    rotary_interleaved: bool = False,
    positions: Array | np.ndarray | None = None,
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
        slot_mapping: in place of these tables, int32 or int64 ``[tokens]``: the slot of each token, which is ``page *
            page_size + offset``; -1 for a token that is not written. A JAX or a numpy array.
        rotary: (cos, sin), each ``[max_positions, rotary_dim / 2]``: the keys are rotated as by ``apply_rotary``.
        rotary_interleaved: as ``interleaved`` there.
        positions: with rotary, int32 or int64 ``[tokens]``: each token's position in its sequence. The tables say it,
            too; slot_mapping does not.
        k_scales, v_scales: the scales of quantised pages, as in ``paged_attention``. Scales by token are written and
            donated, too: each becomes the largest magnitude of its token and head, divided by the largest stored
            number, and NaN for a token with NaN or Inf. Scales by page are read: numbers beyond them saturate.

    Returns:
        ``(k_pages, v_pages)``, the updated pool; with scales also ``k_scales, v_scales``.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and for tables on the host with a page
            outside of the pool or one slot for two tokens, or positions behind the rows of cos. With tables elsewhere,
            a token without a valid slot is not written, and positions are clamped.
    """
    if unknown:
        refuse_keywords(append_kv, unknown)
    cos, sin = (None, None) if rotary is None else pair_of(rotary)
    tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    check_choice(tables, slot_mapping, cos, rotary_interleaved, positions)
    pools, angles = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v}, {COS: cos, SIN: sin}
    scales = {"k_scales": k_scales, "v_scales": v_scales}
    present = {name: array for name, array in {**angles, **scales}.items() if array is not None}
    for name, array in {**pools, **present}.items():
        plan.check_array(name, array)
    if slot_mapping is None:
        tables = dict(zip(tables, checked_tables(*tables.values()), strict=True))
    indices = {"slot_mapping": slot_mapping, "positions": positions}
    for name, array in indices.items():
        if array is not None and not isinstance(array, np.ndarray):
            plan.check_array(name, array)
    device = plan.device_name(k_pages)
    everything = {**pools, **scales, **tables, **indices, **angles}
    arguments.check_append(
        {n: None if a is None else ArrayFacts(a.shape, str(a.dtype), device) for n, a in everything.items()}
    )
    by_page = k_scales is not None and k_scales.ndim == 2
    # An array that numpy has seen cannot be donated, so scales by token are not looked at.
    values = on_host({**(scales if by_page else {}), **tables, **indices})
    places_of_append(k.shape[0], (k_pages.shape[0], k_pages.shape[1]), values, None if cos is None else cos.shape[0])
    arrays = {name: as_operand(array) for name, array in {**pools, **scales, **tables, **angles}.items()}
    arrays["slots"] = without_int64(slot_mapping, k_pages.shape[1])
    arrays["positions"] = copy_numpy(positions)
    # Under the caller's jit the donation is the caller's choice, so only an eager call donates the pool here.
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays.values())
    run = _append if traced else _append_by_page if by_page else _append_donated
    results = run(*arrays.values(), rotary_interleaved)
    return tuple(array for array in results if array is not None)


def without_int64(slots: Array | np.ndarray | None, page_size: int) -> Array | None:
    """Returns slots in numpy as int32 ``[2, tokens]``, each slot's page and the offset in it; others as they are.

    JAX may have no int64, and a pool may have more slots than int32 has numbers.
    """
    return jnp.array(pages_and_offsets(slots, page_size)) if isinstance(slots, np.ndarray) else slots


def _append(*arguments: Any) -> tuple[Array | None, ...]:
    """Runs ``_written``. On a mesh with Explicit axes its results keep the types of the pools and scales."""
    *arrays, interleaved = arguments
    k_pages, v_pages, _, _, k_scales, v_scales, *_ = arrays
    return partitioning.run_like(partial(_written, interleaved), (k_pages, v_pages, k_scales, v_scales), *arrays)


def _written(
    interleaved: bool,
    k_pages: Array,
    v_pages: Array,
    k: Array,
    v: Array,
    k_scales: Array | None,
    v_scales: Array | None,
    table: Any,
    lengths: Any,
    cu: Array | None,
    cos: Array | None,
    sin: Array | None,
    slots: Array | None,
    positions: Any,
) -> tuple[Array | None, ...]:
    """Writes k and v, the keys rotated, and quantised if there are scales. Returns the pools and scales.

    slots: of each token, instead of the three tables; or, ``[2, tokens]``, each slot's page and the offset in it.
    """
    num_pages, page_size = k_pages.shape[:2]
    # Nothing to write; an axis of size 0 has no valid index.
    if k.shape[0] == 0 or num_pages == 0 or (table is not None and table.shape[1] == 0):
        return k_pages, v_pages, k_scales, v_scales
    position = positions
    if slots is not None:
        page, offset = slots if slots.ndim == 2 else (slots // page_size, slots % page_size)
    else:
        page, offset, position = _places_of_tables(k.shape[0], page_size, table, lengths, cu)
    if cos is not None and sin is not None:
        # Nothing rounds a rotated key before it is quantised.
        dtype = k_pages.dtype if k_scales is None else jnp.float32
        k = rotate(k, cos, sin, position if positions is None else positions, interleaved, dtype)
    # write_rows skips pages past the end of the pool; a negative page would count from its end
    has_page = (page >= 0) & (page < num_pages)
    page = jnp.where(has_page, page, num_pages)
    with usual_promotion():
        k_pages, k_scales = write_rows(k_pages, k_scales, (page, offset), k)
        v_pages, v_scales = write_rows(v_pages, v_scales, (page, offset), v)
    return k_pages, v_pages, k_scales, v_scales


def new_tokens(tokens: int, lengths: Array, cu: Array | None) -> tuple[Array, Array]:
    """Returns the sequence of each new token, the number of sequences behind the last offset, and its position there.

    Args:
        lengths, cu: seq_lens, and cu_seqlens_q or None, as in ``append_kv``.
    """
    token = jnp.arange(tokens, dtype=jnp.int32)  # as the tables; under x64 it would be int64
    ends = token + 1 if cu is None else cu[1:]  # where each sequence's new tokens end
    sequence = document_numbers(ends, tokens)
    at = jnp.minimum(sequence, ends.shape[0] - 1)
    return sequence, lengths[at] - (ends[at] - token)


def _places_of_tables(
    tokens: int, page_size: int, table: Array, lengths: Array, cu: Array | None
) -> tuple[Array, Array, Array]:
    """Returns each new token's page, the offset in it, and its position; page -1 if it has no place."""
    batch, width = table.shape
    sequence, position = new_tokens(tokens, lengths, cu)
    owned, sequence = sequence < batch, jnp.minimum(sequence, batch - 1)
    page = table[sequence, jnp.clip(position // page_size, 0, width - 1)]
    inside = owned & (position >= 0) & (position < width * page_size)
    return jnp.where(inside, page, -1), position % page_size, position


def write_rows(
    pages: Array, scales: Array | None, places: tuple[Array, Array], rows: Array
) -> tuple[Array, Array | None]:
    """Returns (pages, scales) with rows ``[tokens, kv_heads, dim]`` at their pages and offsets, quantised if there are
    scales. A page past the end of the pool is skipped."""
    if scales is None:
        return pages.at[places].set(rows, mode="drop"), None
    dtype = STORED[str(pages.dtype)]
    numbers = rows.astype(jnp.float32)
    if scales.ndim == 3:
        new, factors = token_scales(jnp, numbers, dtype)
        scales = scales.at[places].set(new, mode="drop")
    else:
        factors = page_factors(jnp, scales.at[places[0]].get(mode="fill", fill_value=1))
    return pages.at[places].set(stored_numbers(jnp, numbers, factors, dtype), mode="drop"), scales


# Without donation every append would copy the pool. Scales by page are the caller's, and do not change.
_append_donated = jax.jit(_append, donate_argnums=(0, 1, 4, 5), static_argnums=13)
_append_by_page = jax.jit(_append, donate_argnums=(0, 1), static_argnums=13)
