"""apply_attention: the method of that name of MaxText's ``AttentionOp``, on our attention.

Copy this file into your project. ``AttentionOp.apply_attention = apply_attention`` is the one line. MaxText then calls
us from every layer, not its own kernels, whatever ``config.attention`` names. The meaning is that of MaxText's
``attention="dot_product"``; MaxText is not imported here. docs/how_to/migrate/maxtext.md lists every argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend import attention

__all__ = ["apply_attention"]

Array = jax.Array
Results = tuple[Array, Array | None, Array | None]

_TYPES = ("global", "local_sliding", "chunk", "mla", "full", "block_diffusion")
_MODES = ("train", "prefill", "autoregressive")
_ACTIVE = 1
"""MaxText's id of a place of the cache that holds a token (DECODING_ACTIVE_SEQUENCE_INDICATOR)."""
_HIDDEN = -0.35 * float(jnp.finfo(jnp.float32).max)
"""MaxText's additive masks hide a pair below half of DEFAULT_MASK_VALUE."""


class _Call(NamedTuple):
    """What a mask depends on, besides arrays: the ``attention_type``, and the first query's place among the keys."""

    kind: str
    decodes: bool
    offset: int
    q_len: int
    kv_len: int


def apply_attention(
    op: Any,
    query: Array,
    key: Any,
    value: Any,
    decoder_segment_ids: Array | None,
    segment_positions: Array | None,
    lengths: Array | None,
    model_mode: str,
    use_ragged_attention: bool = False,
    previous_chunk: Any = None,
    bidirectional_mask: Any = None,
    sinks: Array | None = None,
    indexer_mask: Array | None = None,
    compressed_mask: Array | None = None,
    record_max_logits: bool = False,
    decoder_segment_ids_kv: Array | None = None,
    *,
    qk_product_einsum: Callable[..., Array],
    wv_product_einsum: Callable[..., Array],
) -> Results:
    """Computes ``AttentionOp.apply_attention(...)`` with the attention of ``jax_frontend``.

    Args:
        op: the ``AttentionOp``. Of its fields these change the result: ``attention_type``, ``sliding_window_size``,
            ``chunk_attn_window_size``, ``causal_block_size`` and ``attn_logits_soft_cap``.
        query: ``[batch, q_len, heads, head_dim]``, already scaled, as MaxText's layers pass it.
        key, value: ``[batch, kv_len, kv_heads, dim]``; a quantised ``KVTensor`` of the cache is dequantised.
        decoder_segment_ids: int32 ``[batch, q_len]``: a query sees keys of its own id, and no key of a negative id.
            ``[batch, kv_len]`` with previous_chunk; in autoregressive mode too, and there keys of id 1 are visible.
        segment_positions, lengths: ignored, as MaxText's ``dot_product`` does without context parallelism.
        model_mode: "train", "prefill" or "autoregressive".
        use_ragged_attention: raises an error in autoregressive mode.
        previous_chunk: the chunk before the queries; its length is the place of the first query among the keys.
        bidirectional_mask: bool ``[batch, length]``: neighbours that are True see each other, whatever else hides them.
        sinks: ``[heads]``, a logit per head in the softmax.
        indexer_mask: ``[batch, q_len, kv_len]``, 0 where visible, a large negative number where hidden.
        compressed_mask: must be None. record_max_logits: puts the largest logits ``[batch, heads]`` on op.max_logits.
        decoder_segment_ids_kv: int32 ``[batch, kv_len]``, the ids of keys, if they differ from those of queries.
        qk_product_einsum, wv_product_einsum: ``jnp.einsum``, or those of a quantised cache: kernels run no einsum.

    Returns:
        ``(out, None, None)``, out ``[batch, q_len, heads, value_dim]``; in autoregressive mode ``(out, max, sum)``,
        whose ``max + log(sum)`` is the log-sum-exp ``[batch, q_len, heads, 1]``: MaxText merges two parts of a cache.

    Raises:
        SpecError, ShapeError, DTypeError: naming the argument, or the field of op.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    if model_mode not in _MODES:
        raise SpecError(f"model_mode={shown(model_mode)}: expected one of {', '.join(_MODES)}")
    decodes = model_mode == "autoregressive"
    _refuse(op, compressed_mask, use_ragged_attention and decodes, model_mode == "train")
    for name, einsum in (("qk_product_einsum", qk_product_einsum), ("wv_product_einsum", wv_product_einsum)):
        if einsum is not jnp.einsum and op.kv_quant is None:
            raise SpecError(f"{name}: expected jnp.einsum, because kernels run no einsum that it could replace")
    arrays = {"query": query, "key": key, "value": value}
    arrays = {name: array.dequant() if hasattr(array, "dequant") else array for name, array in arrays.items()}
    q, k, v = _in_one_dtype({name: _array(name, array) for name, array in arrays.items()})
    call = _call_of(op, decodes, previous_chunk, q.shape[1], k.shape[1])
    options = _visible(op, call, (decoder_segment_ids, decoder_segment_ids_kv), bidirectional_mask, q.shape[0])
    if indexer_mask is not None:
        shown_keys = (_array("indexer_mask", indexer_mask) >= _HIDDEN)[:, None]
        options["mask"] = shown_keys & options["mask"] if "mask" in options else shown_keys
    softcap = op.attn_logits_soft_cap or None  # MaxText's 0 is no cap
    options |= {"return_lse": decodes, "return_max_logit": record_max_logits}
    results: Any = attention(q, k, v, scale=1.0, softcap=softcap, sinks=sinks, **options)
    if record_max_logits:
        from flax import nnx

        op.max_logits = nnx.Intermediate(results[-1])
    if not decodes:
        return results[0] if record_max_logits else results, None, None
    out, lse = results[0], jnp.swapaxes(results[1], 1, 2)[..., None]  # [batch, q_len, heads, 1]
    # A part of the cache without a visible key has weight 0; -inf in both parts would give NaN in MaxText's merge.
    return out, jnp.maximum(lse, 2 * _HIDDEN), jnp.ones_like(lse)


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from None


def _refuse(op: Any, compressed_mask: Any, ragged: bool, trains: bool) -> None:
    """Raises SpecError for what no kernel can honour, by the name that it has in MaxText."""
    kind, config = _kind(op), op.config
    if kind not in _TYPES:
        raise SpecError(f"attention_type={kind}: expected one of {', '.join(_TYPES)}")
    if compressed_mask is not None:
        raise SpecError("compressed_mask: expected None, because compressed attention is not supported here")
    if ragged:
        raise SpecError("use_ragged_attention=True: expected False; the mask of the cache hides empty places already")
    if getattr(config, "moba", False):
        raise SpecError("config.moba=True: expected False, because its gates choose keys from the scores")
    if trains and getattr(config, "enable_dropout", False) and op.dropout_rate:
        raise SpecError(f"dropout_rate={op.dropout_rate}: expected 0, as MaxText passes no random key to its kernels")
    axis = getattr(config, "context_sharding", None)
    shards = 1 if op.mesh is None else op.mesh.shape.get(axis, 1)
    if shards > 1:
        raise SpecError(
            f"config.context_sharding={axis!r}: expected a mesh axis of size 1, got {shards}; a row on several devices "
            "is jax_frontend.context_parallel_attention"
        )


def _kind(op: Any) -> str:
    return str(getattr(op.attention_type, "value", op.attention_type))


def _in_one_dtype(arrays: dict[str, Array]) -> list[Array]:
    """Returns query, key and value in the dtype that they promote to, since a cache may have another."""
    for name, array in arrays.items():
        if array.ndim != 4:
            raise ShapeError(f"{name}: expected [batch, length, heads, head_dim], got {list(array.shape)}")
    dtype = jnp.result_type(*arrays.values())
    return [array.astype(dtype) for array in arrays.values()]


def _call_of(op: Any, decodes: bool, previous_chunk: Any, q_len: int, kv_len: int) -> _Call:
    kind = _kind(op)
    if previous_chunk is not None:
        return _Call(kind, decodes, previous_chunk.shape[1], q_len, kv_len)
    if decodes and q_len != 1 and kind in ("local_sliding", "chunk"):
        raise SpecError(f"query: expected one token in autoregressive mode with attention_type={kind}, got {q_len}")
    # The query of a cache stands at its last place.
    return _Call(kind, decodes, kv_len - 1 if decodes and q_len == 1 else 0, q_len, kv_len)


def _visible(op: Any, call: _Call, segments: tuple[Any, Any], images: Any, batch: int) -> dict[str, Any]:
    """Returns the keywords of ``attention`` that say which keys each query sees."""
    ids = _ids(call, *segments, batch)
    if images is not None:
        return _with_images(op, call, ids, images, batch)
    options: dict[str, Any] = {}
    if call.decodes and ids:
        options["mask"] = (ids[0] == _ACTIVE)[:, None, None, :]
    elif call.decodes and call.kind in ("local_sliding", "chunk"):
        raise SpecError(f"decoder_segment_ids=None: expected ids in autoregressive mode with {call.kind}")
    elif ids:
        options |= {"q_segment_ids": ids[0], "kv_segment_ids": ids[1]}
    if call.kind == "local_sliding":
        return options | _causal(call, batch) | {"window": _positive(op, "sliding_window_size")}
    if call.kind in ("global", "mla") and not call.decodes:
        return options | _causal(call, batch)
    places = _places(op, call)
    return options if places is None else options | {"mask_mod": places}


def _ids(call: _Call, queries: Any, keys: Any, batch: int) -> tuple[Array, ...]:
    """Returns the ids of queries and keys, negative ones equal to no other; of a cache's places alone; () without."""
    if keys is not None and (queries is None or call.decodes):
        raise SpecError("decoder_segment_ids_kv: expected None without decoder_segment_ids and in autoregressive mode")
    if queries is None:
        return ()
    name = "decoder_segment_ids" if keys is None else "decoder_segment_ids_kv"
    of_queries = _array("decoder_segment_ids", queries).astype(jnp.int32)
    of_keys = of_queries if keys is None else _array(name, keys).astype(jnp.int32)
    _check_ids(name, of_keys, batch, call.kv_len)
    if call.decodes:
        return (of_keys,)
    if call.offset:
        of_queries = of_queries[:, call.offset : call.offset + call.q_len]
    _check_ids("decoder_segment_ids", of_queries, batch, call.q_len)
    return jnp.maximum(of_queries, -1), jnp.where(of_keys < 0, -2, of_keys)


def _check_ids(name: str, ids: Array, batch: int, length: int) -> None:
    if ids.shape != (batch, length):
        raise ShapeError(f"{name}: expected [batch, length] = [{batch}, {length}], got {list(ids.shape)}")


def _causal(call: _Call, batch: int) -> dict[str, Any]:
    if call.offset in (0, call.kv_len - call.q_len):
        return {"causal": True, "alignment": "bottom_right" if call.offset else "top_left"}
    queries, keys = (jnp.arange(length, dtype=jnp.int32) for length in (call.q_len, call.kv_len))
    rows = [jnp.broadcast_to(place, (batch, len(place))) for place in (queries + call.offset, keys)]
    return {"causal": True, "q_positions": rows[0], "kv_positions": rows[1]}


def _places(op: Any, call: _Call) -> Callable[..., Any] | None:
    """Returns the mask by places alone, as a mask function; None if every pair is visible."""
    start = call.offset
    if call.kind == "chunk":
        size = _positive(op, "chunk_attn_window_size")
        return lambda b, h, q, k, *aux: ((q + start) // size == k // size) & (k <= q + start)
    if call.kind == "local_sliding":
        left = _positive(op, "sliding_window_size") - 1
        return lambda b, h, q, k, *aux: (k >= q + (start - left)) & (k <= q + start)
    if call.kind == "full" or call.decodes:
        return None
    if call.kind == "block_diffusion":
        block = _positive(op, "causal_block_size")
        return lambda b, h, q, k, *aux: (q + start) // block >= k // block
    return lambda b, h, q, k, *aux: k <= q + start


def _with_images(op: Any, call: _Call, ids: tuple[Any, ...], images: Any, batch: int) -> dict[str, Any]:
    """Returns a mask function that also shows the pairs inside a run of bidirectional tokens."""
    if call.decodes or call.offset or call.q_len != call.kv_len:
        raise SpecError("bidirectional_mask: expected None in autoregressive mode, with previous_chunk or for a cache")
    flags = _array("bidirectional_mask", images).astype(bool)
    if flags.shape != (batch, call.kv_len):
        raise ShapeError(f"bidirectional_mask: expected [{batch}, {call.kv_len}], got {list(flags.shape)}")
    places = _places(op, call)
    if places is None and not ids:
        return {}
    starts = flags & ~jnp.pad(flags, ((0, 0), (1, 0)))[:, :-1]
    runs = jnp.where(flags, jnp.cumsum(starts, axis=1), 0).astype(jnp.int32)  # 0, or the number of the token's run

    def mask(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
        seen = aux[1][b, q] == aux[2][b, k] if ids else None
        if places is not None:
            seen = places(b, h, q, k) if seen is None else places(b, h, q, k) & seen
        return seen | ((aux[0][b, q] == aux[0][b, k]) & (aux[0][b, q] > 0))

    return {"mask_mod": mask, "aux": (runs, *ids)}


def _positive(op: Any, name: str) -> int:
    size = getattr(op, name, None)
    if not isinstance(size, int) or size <= 0:
        raise SpecError(f"{name}={shown(size)}: expected an int of 1 or more for attention_type={_kind(op)}")
    return size
