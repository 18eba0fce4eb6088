"""attend: runs an ``equinox.nn.MultiheadAttention`` on our attention. It is a function, because the layer has no hook.

``layer(query, key_, value, mask, key=..., inference=..., process_heads=...)`` becomes ``attend(layer, ...)`` with the
same arguments and numbers, followed by our own options. The layer, its parameters and its checkpoints do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import EquinoxKeywords
from attn_core.call.options import Door, names_at
from attn_core.call.segments import Segments
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError, needs_extra
from jax_frontend.attention import attention
from jax_frontend.dispatch.plan import as_array, check_array

with needs_extra(__name__, "equinox", "equinox"):
    import equinox as eqx

__all__ = ["attend"]

Array = jax.Array
ProcessHeads = Callable[[Array, Array, Array], tuple[Array, Array, Array]]

_shared = SharedOptions(attention, names_at(Door.EQUINOX))


@_shared
def attend(
    layer: eqx.nn.MultiheadAttention,
    query: Array,
    key_: Array,
    value: Array,
    mask: Array | None = None,
    *,
    key: Array | None = None,
    inference: bool | None = None,
    deterministic: bool | None = None,
    process_heads: ProcessHeads | None = None,
    bitwise_deterministic: bool = False,
    **options: Unpack[EquinoxKeywords[Array]],
) -> Array:
    """Computes ``layer(query, key_, value, mask, ...)`` with the attention of ``jax_frontend``.

    Args:
        query: ``[q_len, query_size]``; use ``jax.vmap`` for a batch, as with the layer itself.
        key_, value: ``[kv_len, key_size]`` and ``[kv_len, value_size]``.
        mask: ``[q_len, kv_len]`` or ``[heads, q_len, kv_len]``; nonzero = visible. A query that may see no key gets 0
            before the output projection; the layer itself gives it the mean of the values.
        key: a PRNG key, for dropout. It drops other weights than the layer itself does with the same key.
        inference: no dropout; the layer's own setting if None.
        deterministic: the layer's deprecated name of inference.
        process_heads: ``(q, k, v) -> (q, k, v)``, ``[length, heads, channels]`` each, of unchanged shapes.
        causal, alignment, window, softcap, scale, key_ranges, mask_mod, score_mod, aux, bias, alibi_slopes, sinks,
            seq_info, backend, invariant: as in ``jax_frontend.attention``. bias is ``[q_len, kv_len]`` or
            ``[heads, q_len, kv_len]``; with seq_info the rows are packed documents.
        q_segment_ids, kv_segment_ids, q_positions, kv_positions: as in ``jax_frontend.attention``, int32 ``[q_len]``
            and ``[kv_len]``.
        bitwise_deterministic: the same bits on every run (``deterministic=`` of ``jax_frontend.attention``).

    Returns:
        ``[q_len, output_size]``.

    Raises:
        SpecError, ShapeError, NoBackendError: naming the argument, its value and the remedy.
    """
    said = _shared.complete(attend, {**options})
    _check_rows(layer, query, key_, value, process_heads)
    if deterministic is not None:
        warnings.warn("attend(deterministic=...) is deprecated, as in equinox: pass inference=...", stacklevel=2)
        inference = deterministic
    dropout = _dropout(layer.dropout, key, inference)
    q, k, v = _heads(layer, (query, key_, value), process_heads)
    sizes = (q.shape[1], q.shape[0], k.shape[0])  # heads, q_len, kv_len
    said |= {name: _one_row(name, said[name]) for name in Segments._fields}
    if said["bias"] is not None:
        said["bias"] = _table("bias", as_array("bias", said["bias"]), sizes)
    if said["seq_info"] is None:  # packed rows need no batch axis; a dense call needs one
        q, k, v = q[None], k[None], v[None]
    out = attention(
        q,
        k,
        v,
        mask=None if mask is None else _table("mask", as_array("mask", mask).astype(bool), sizes),
        dropout=dropout,
        deterministic=bitwise_deterministic,
        dropout_rng=key if dropout else None,
        **said,
    )
    # equinox's Linear takes one vector.
    flat = out.reshape(sizes[1], sizes[0] * out.shape[-1])  # [q_len, heads * vo_size]
    return jax.vmap(layer.output_proj)(flat)  # [q_len, output_size]


def _check_rows(
    layer: eqx.nn.MultiheadAttention, query: Array, key_: Array, value: Array, process_heads: object
) -> None:
    """Checks the layer and its arrays ``[length, features]``."""
    if not isinstance(layer, eqx.nn.MultiheadAttention):
        raise SpecError(f"layer: expected an equinox.nn.MultiheadAttention, got {type(layer).__name__}")
    if process_heads is not None and not callable(process_heads):
        raise SpecError(f"process_heads: expected a function, or None, got {type(process_heads).__name__}")
    sizes = (("query", query, "query_size"), ("key_", key_, "key_size"), ("value", value, "value_size"))
    for name, array, size in sizes:
        if not isinstance(array, np.ndarray):
            check_array(name, array)
        if str(as_array(name, array).dtype) not in DTYPES:
            raise DTypeError(f"{name}: expected one of {', '.join(DTYPES)}, got {array.dtype}")
        features = getattr(layer, size)
        if array.ndim != 2 or array.shape[1] != features:
            raise ShapeError(
                f"{name}: expected [length, {size}] = [length, {features}], got {list(array.shape)}; "
                "a batch goes through jax.vmap"
            )
    if key_.shape[0] != value.shape[0]:
        raise ShapeError(f"value: expected the length of key_ ({key_.shape[0]}), got {value.shape[0]}")


def _dropout(layer: eqx.nn.Dropout, key: Array | None, inference: bool | None) -> float:
    """Returns the dropout rate of this call; 0 if dropout is off."""
    off = layer.inference if inference is None else inference
    if off or (isinstance(layer.p, (int, float)) and layer.p == 0):
        return 0.0
    # A traced rate has no value that says whether to drop weights.
    if not isinstance(layer.p, (int, float)):
        raise SpecError(
            f"layer.dropout.p: expected a Python number, got {type(layer.p).__name__}; eqx.filter_jit keeps it one, "
            "jax.jit does not"
        )
    if key is None:
        raise SpecError(f"key=None: expected a PRNG key for dropout_p={layer.p}; or pass inference=True")
    return float(layer.p)


def _heads(
    layer: eqx.nn.MultiheadAttention, rows: tuple[Array, Array, Array], process_heads: ProcessHeads | None
) -> tuple[Array, Array, Array]:
    """Projects the rows, ``[length, features]`` -> ``[length, heads, channels]`` each, to one dtype."""
    projections = (layer.query_proj, layer.key_proj, layer.value_proj)
    projected = [jax.vmap(project)(array) for project, array in zip(projections, rows, strict=True)]
    # With every size, because JAX infers none for an array without rows.
    heads = [array.reshape(len(array), layer.num_heads, array.shape[1] // layer.num_heads) for array in projected]
    if process_heads is not None:
        shapes, heads = [array.shape for array in heads], list(process_heads(*heads))
        for name, array, shape in zip(("query", "key", "value"), heads, shapes, strict=True):
            if array.shape != shape:
                raise ShapeError(f"process_heads: expected {name} heads of {list(shape)}, got {list(array.shape)}")
    # process_heads may return other dtypes (a rotary embedding in float32), and attention needs one.
    dtype = jnp.result_type(*heads)
    return heads[0].astype(dtype), heads[1].astype(dtype), heads[2].astype(dtype)


def _one_row(name: str, array: Any) -> Array | None:
    """Returns numbers of tokens ``[length]`` as ``[1, length]``. ``attention`` checks length, dtype and type."""
    shape = getattr(array, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ShapeError(f"{name}: expected [length], one number for each row, got {list(shape)}")
    return array if shape is None else array[None]


def _table(name: str, array: Array, sizes: tuple[int, int, int]) -> Array:
    """Returns ``[q_len, kv_len]`` or ``[heads, q_len, kv_len]`` as ``[1, heads or 1, q_len, kv_len]``."""
    heads, q_len, kv_len = sizes
    if array.shape not in ((q_len, kv_len), sizes):
        raise ShapeError(
            f"{name}: expected [q_len, kv_len] = [{q_len}, {kv_len}] or [heads, q_len, kv_len] = "
            f"[{heads}, {q_len}, {kv_len}], got {list(array.shape)}"
        )
    return array.reshape(1, heads if array.ndim == 3 else 1, q_len, kv_len)
