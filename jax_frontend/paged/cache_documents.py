"""Rows of a dense cache as packed documents, for JAX arrays: the form of calls with many queries."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import cache_rows
from attn_core.call.arguments import ArrayFacts, Arrays
from attn_core.call.cache_rows import CacheRows
from attn_core.call.options import PLAIN, Options, check_options, requested_names
from attn_core.call.seq_info import SeqInfo
from attn_core.selection import Target, override
from attn_core.selection.dense_caches import runs_packed
from jax_frontend.dispatch import plan

Array = jax.Array


def are_documents(qkv: tuple[Any, ...], rows: CacheRows, options: dict[str, Any]) -> bool:
    """Returns whether a call in the form of pages runs as packed documents instead, see ``runs_packed``.

    qkv: arrays or their shapes.
    """
    device = plan.device_name(qkv[0])
    every = (*qkv, None, None, options["alibi_slopes"], options["sinks"])
    facts = [None if a is None else ArrayFacts(tuple(a.shape), str(np.dtype(a.dtype)), device) for a in every]
    names = requested_names(options["backend"]) or override.requested()
    plain = check_options(Options(**{name: options[name] for name in PLAIN}))
    return runs_packed(rows, Arrays(*facts), plain, Target.here("jax", device), names)  # type: ignore[arg-type]


def as_documents(
    q: Array, k: Array, v: Array, rows: CacheRows, options: dict[str, Any]
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """Returns the arrays and the keywords of ``attention`` for the same call on documents, see ``cache_rows``."""
    (batch, count), kv_len = q.shape[:2], k.shape[1]
    lengths, starts, _ = cache_rows.clamped(rows, kv_len, k.shape[0])
    first = jnp.arange(0, batch * kv_len, kv_len, dtype=jnp.int32)
    ends = first + (kv_len if lengths is None else lengths)
    edges = jnp.stack((first if starts is None else first + starts, ends), 1).reshape(-1)
    keys = jnp.concatenate((first[:1], edges, first[-1:] + kv_len))
    queries = jnp.repeat(jnp.arange(0, batch * count + 1, count, dtype=jnp.int32), 2)
    longest = kv_len if starts is None else 2 * kv_len
    dropped = ("layout", *cache_rows.EXCLUDED)
    others = {name: value for name, value in options.items() if name not in dropped}
    arrays = tuple([each.reshape(-1, *each.shape[2:]) for each in (q, k[:batch], v[:batch])])
    return arrays, others | {"seq_info": SeqInfo(queries, keys, count, longest)}


def shapes_of_documents(
    qkv: tuple[Any, ...], rows: CacheRows, options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns ``as_documents`` of arrays or their shapes, with shapes in place of arrays."""
    plain = {name: options[name] for name in (*PLAIN, "sinks", "alibi_slopes", "backend")}

    def arrays_of(q: Array, k: Array, v: Array, rows: CacheRows) -> tuple[Any, ...]:
        documents, others = as_documents(q, k, v, rows, plain)
        return *documents, others["seq_info"].cu_seqlens_q, others["seq_info"].cu_seqlens_k

    q, k, v, queries, keys = jax.eval_shape(arrays_of, *qkv, rows)
    return (q, k, v), plain | {"seq_info": SeqInfo(queries, keys, qkv[0].shape[1], 2 * qkv[1].shape[1])}
