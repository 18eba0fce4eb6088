"""Gathers paged keys and values for JAX: rows as long as the table is wide, and a mask that hides the rest.

For ``fixed_tiles`` they are cut into tiles from each sequence's first key on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_core.backends.jax_xla import fixed_tiles
from attn_core.backends.shared.pages import dense_rows
from attn_core.call.key_ranges import contains
from attn_core.call.kinds import is_number
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.paged.quantised import real_numbers

if TYPE_CHECKING:
    import jax

Forward = Callable[[AttentionSpec, Inputs], tuple[Any, Any]]


def forward(spec: AttentionSpec, inputs: PagedInputs, run: Forward) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of a paged call, by ``run`` on dense keys and values; traceable.

    Page numbers are clamped to the pool and lengths to the table, because traced values cannot be checked.
    """
    import jax.numpy as jnp

    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    rows = spec.max_len_q or spec.q_len
    rows = min(rows, spec.q_len) if is_number(spec.q_len) else rows
    lengths = jnp.clip(inputs.seq_lens, 0, paged.capacity)
    key = jnp.arange(paged.capacity, dtype=jnp.int32)
    valid = key < lengths[:, None]  # [batch, capacity]
    if inputs.kv_starts is not None:
        valid = valid & (key >= inputs.kv_starts[:, None])

    def row(pool: jax.Array, scales: jax.Array | None) -> jax.Array:
        wide = _gathered(paged, inputs, pool, scales)
        return jnp.where(valid[:, :, None, None], wide, 0)  # slots after the end may hold NaN

    cu_q = inputs.cu_seqlens_q
    cu_q = jnp.arange(batch + 1, dtype=jnp.int32) if cu_q is None else jnp.clip(cu_q, 0, spec.q_len)
    count = jnp.clip(cu_q[1:] - cu_q[:-1], 0, rows)
    query = jnp.arange(rows, dtype=jnp.int32)
    is_query = query < count[:, None]  # [batch, rows]
    # Rows after a sequence's last query read any token in range; their results are dropped below.
    token = jnp.minimum(cu_q[:-1, None] + query, max(spec.q_len - 1, 0))
    distance = key - (query + (lengths - count)[:, None])[..., None]  # [batch, rows, capacity]
    seen, edge = valid[:, None] & is_query[..., None], band(spec)
    if edge.left is not None:
        seen &= distance >= -edge.left
    if edge.right is not None:
        seen &= distance <= edge.right
    seen = seen[:, None]  # [batch, 1, rows, capacity]
    if inputs.key_ranges is not None:
        place = key - (lengths - count)[:, None]  # among the sequence's new tokens; old ones: negative
        of_key = jnp.clip(cu_q[:-1, None] + place, 0, max(spec.q_len - 1, 0))  # [batch, capacity]
        ranges = inputs.key_ranges[0][:, of_key].swapaxes(0, 1)  # [batch, kv_heads or 1, capacity, ranges, 2]
        shown = contains(ranges, token[:, None]) | (place < 0)[:, None, None]
        seen = seen & (shown if shown.shape[1] == 1 else jnp.repeat(shown, spec.group_size, axis=1))
    bias = None
    if inputs.alibi_slopes is not None:  # [batch or 1, heads, 1, 1] * [batch, 1, rows, capacity]
        slopes = inputs.alibi_slopes.astype(spec.lse_dtype).reshape(-1, spec.num_heads, 1, 1)
        bias = -slopes * jnp.abs(distance)[:, None].astype(spec.lse_dtype)
    k, v = row(inputs.k, inputs.k_scales), row(inputs.v, inputs.v_scales)
    dense = Inputs(inputs.q[token].astype(k.dtype), k, v, mask=seen, bias=bias, sinks=inputs.sinks)
    out, lse = run(dense_rows(spec, rows), dense)
    out = out.astype(spec.dtype)
    # Surplus rows of short sequences are dropped, because their index is out of range.
    target = jnp.where(is_query, token, spec.q_len)
    flat_out = jnp.zeros(spec.out_shape, out.dtype).at[target].set(out, mode="drop")
    flat_lse = jnp.full((spec.q_len, spec.num_heads), -jnp.inf, lse.dtype)
    return flat_out, flat_lse.at[target].set(lse.swapaxes(1, 2), mode="drop").T


def forward_in_tiles(spec: AttentionSpec, inputs: PagedInputs) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) of a paged call by ``fixed_tiles``; traceable. Clamps page numbers, lengths and offsets.

    Each sequence becomes a packed document that has the keys of a whole row of the table; only those up to its length
    belong to it.
    """
    import jax.numpy as jnp

    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    lengths = jnp.clip(inputs.seq_lens, 0, paged.capacity).astype(jnp.int32)
    starts = jnp.zeros_like(lengths) if inputs.kv_starts is None else jnp.clip(inputs.kv_starts, 0, lengths)
    k = _gathered(paged, inputs, inputs.k, inputs.k_scales)
    v = _gathered(paged, inputs, inputs.v, inputs.v_scales)
    cu_q = inputs.cu_seqlens_q
    cu_q = jnp.arange(batch + 1, dtype=jnp.int32) if cu_q is None else jnp.clip(cu_q, 0, spec.q_len).astype(jnp.int32)
    count = jnp.maximum(cu_q[1:] - cu_q[:-1], 0)
    row = jnp.arange(batch, dtype=jnp.int32)
    keys = lengths - starts
    documents = fixed_tiles.Document(jnp.zeros_like(row), cu_q[:-1], count, row, starts, keys, keys - count)
    dtype = str(k.dtype)
    packed = replace(spec, paged=None, kv_len=paged.capacity, dtype=dtype, max_len_k=paged.capacity)
    dense = Inputs(inputs.q.astype(dtype), k, v, alibi_slopes=inputs.alibi_slopes, sinks=inputs.sinks)
    out, lse = fixed_tiles.forward(packed, dense, documents)
    return out.astype(spec.dtype), lse


def _gathered(paged: PagedKV, inputs: PagedInputs, pool: jax.Array, scales: jax.Array | None) -> jax.Array:
    """Returns the keys or values of each sequence, ``[batch, capacity, kv_heads, dim]``; numbers of quantised pages.

    Args:
        scales: of the pool, or None.
    """
    import jax.numpy as jnp

    pages = jnp.clip(inputs.block_table, 0, paged.num_pages - 1)
    # [batch, width, page_size, kv_heads, dim] -> [batch, capacity, kv_heads, dim]
    wide = pool[pages].reshape(pages.shape[0], paged.capacity, *pool.shape[2:])
    if scales is None:
        return wide
    # [batch, width, kv_heads] by page, or [batch, width, page_size, kv_heads] -> [batch, capacity, kv_heads]
    scales = scales[pages]
    scales = jnp.repeat(scales, paged.page_size, axis=1) if paged.scales == "page" else scales
    return real_numbers(jnp, wide, scales.reshape(*wide.shape[:3]), paged.dtype)
