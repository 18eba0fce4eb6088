"""What flash-attn's functions need of JAX."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from attn_core.backends import plain_backend
from attn_core.call.arguments import ArrayFacts
from attn_core.call.cache_rows import OPTIONS, CacheRows
from attn_core.dropins.flash_attn.cache import Cached, append_arguments
from attn_core.dropins.flash_attn.frontend import Frontend
from jax_frontend.attention import attention
from jax_frontend.bridge.forked import check_process
from jax_frontend.dispatch import partitioning, plan
from jax_frontend.paged import dense_caches
from jax_frontend.paged.append import append_kv
from jax_frontend.paged.attention import paged_attention
from jax_frontend.paged.rotary import apply_rotary
from jax_frontend.qkvpacked import attention_qkvpacked

Array = jax.Array


def _attention_to_rows(q: Array, k: Array, v: Array, lengths: Array, **options: Any) -> Any:
    check_process()
    return dense_caches.attend(attention, (q, k, v), CacheRows(lengths), OPTIONS | options, shifted=True)


def _unstack(array: Array, axis: int) -> tuple[Array, ...]:
    before = (slice(None),) * axis
    return tuple([array[(*before, at)] for at in range(array.shape[axis])])


def _split(array: Array, sizes: list[int], axis: int) -> tuple[Array, ...]:
    return tuple(jnp.split(array, np.cumsum(sizes)[:-1].tolist(), axis))


def _equal_offsets(batch: int, tokens: int, device: None) -> Array:
    return jnp.arange(0, batch * tokens + 1, tokens, dtype=jnp.int32)


def _positions(before: Array, tokens: int, banded: bool) -> Array:
    first = before[:, None]
    if not banded or tokens == 1:
        return jnp.broadcast_to(first, (before.shape[0], tokens))
    return first + jnp.arange(tokens, dtype=jnp.int32)


def _values_on_host(q: Array, *tables: Array | None) -> tuple[np.ndarray | None, ...] | None:
    if not all([each is None or plan.is_on_host(each) for each in tables]):
        return None
    return tuple([None if each is None else np.asarray(each) for each in tables])


def _on_mesh(run: Callable[[Cached], Any], call: Cached, with_lse: bool) -> Any:
    """Runs a call with the Explicit axes of a mesh as Auto ones."""
    arrays = {name: array for name, array in call._asdict().items() if array is not None}
    mesh = partitioning.explicit_mesh(arrays)
    if mesh is None:
        return run(call)
    *rows, heads, _ = (*partitioning.spec_of(call.q), *(None,) * 4)[: call.q.ndim]
    rows = rows[:-1]  # the batch, unless q is packed: tokens are whole
    out = (P(*rows, None, heads), P(*rows, heads)) if with_lse else P(*rows, None, heads)
    specs = out, tuple(map(partitioning.spec_of, (call.k_cache, call.v_cache)))
    return partitioning.as_auto(lambda given: run(Cached(*map(given.get, Cached._fields))), mesh, specs)(arrays)


def _append(call: Cached, pages: Array, seq_lens: Array, interleaved: bool) -> tuple[Array, Array]:
    batch, new = call.k.shape[:2]
    offsets = None if new == 1 else _equal_offsets(batch, new, None)
    arrays, tables = append_arguments(call, pages, seq_lens, interleaved, offsets)
    k_cache, v_cache = append_kv(*arrays, **tables)
    return k_cache, v_cache


JAX = Frontend(
    attention=attention,
    attention_qkvpacked=attention_qkvpacked,
    paged_attention=paged_attention,
    apply_rotary=apply_rotary,
    attention_to_rows=_attention_to_rows,
    numpy=jnp,
    updates_in_place=False,
    portable=lambda: (plain_backend("torch"), plain_backend("jax")),  # the second needs no torch
    check_array=plan.check_array,
    check_constant=plan.check_array,
    facts=lambda array: ArrayFacts(array.shape, str(array.dtype), ""),
    device=lambda array: None,
    cast=lambda array, dtype: array.astype(dtype),
    stop_gradient=jax.lax.stop_gradient,
    empty=lambda array, dtype: jnp.zeros(0, dtype),
    split=_split,
    unstack=_unstack,
    searchsorted=partial(jnp.searchsorted, side="right"),
    repeated=lambda key: key,
    rows_as_table=lambda batch, device: jnp.arange(batch, dtype=jnp.int32)[:, None],
    equal_offsets=_equal_offsets,
    positions=_positions,
    values_on_host=_values_on_host,
    without_gradient=lambda run, **arrays: run(),
    seen=lambda *call: None,
    on_mesh=_on_mesh,
    planned=lambda arrays, how: partial(paged_attention, arrays[0], **how),
    append=_append,
)
