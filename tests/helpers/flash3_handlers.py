"""The four handlers of dew-flash-attn's FlashAttention 3 in JAX operations, for tests of ``flash3_xla`` without a GPU.

They follow flash-attn3-jax's flash.cpp: the clamped windows, bottom-right bands, 0 and -inf for rows that see no key,
log-sum-exps of -inf that count as 0 in the backward, and what no document has stays unwritten, which is NaN here.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ATTRIBUTES = {"softmax_scale": np.float64, "is_causal": bool, "window_size_left": np.int64}
ATTRIBUTES |= {"window_size_right": np.int64}
LENGTHS = {"max_seqlen": np.int64, "max_seqlen_k": np.int64}


def call(target: str, types: tuple[Any, ...], *operands: Any, **attributes: Any) -> tuple[Any, ...]:
    """Runs a handler by our name; stands in for ``flash3_xla._call``."""
    name = target.removeprefix("attn_core_flash3_")
    packed, backward = name.startswith("varlen_"), name.endswith("bwd")
    kinds = ATTRIBUTES | (LENGTHS if packed else {})
    assert {name: type(value) for name, value in attributes.items()} == kinds
    count = 6 if backward else 3
    tensors, offsets = operands[:count], operands[count:]
    assert len(offsets) == 2 * packed and all(cu.dtype == jnp.int32 for cu in offsets)
    q, k, v = tensors[1:4] if backward else tensors
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    if not packed:
        seen = _band(q.shape[1], k.shape[1], q.shape[1], k.shape[1], attributes)
        rows = keys = None
    else:
        seen, rows, keys = _documents(q.shape[0], k.shape[0], *offsets, attributes)
        tensors = [x[None] for x in tensors]
    scale = jnp.float32(attributes["softmax_scale"])
    results = (_backward if backward else _forward)(seen, scale, *tensors)
    if packed:
        unwritten = (rows, keys, keys) if backward else (rows, rows)
        axes = (0, 0, 0) if backward else (0, 1)
        results = [_unwritten(x[0], where, axis) for x, where, axis in zip(results, unwritten, axes, strict=True)]
    scratch = [jnp.full(each.shape, jnp.nan, each.dtype) for each in types[len(results) :]]
    _check_scratch(backward, packed, q, offsets, scratch)
    for result, expected in zip((*results, *scratch), types, strict=True):
        assert result.shape == expected.shape and result.dtype == expected.dtype
    return (*results, *scratch)


def _check_scratch(backward: bool, packed: bool, q: Any, offsets: tuple[Any, ...], scratch: list[Any]) -> None:
    """Asserts that the backward's rows hold the largest tile, 128 rows, at the end of each sequence."""
    if not backward:
        return
    if packed:
        documents = offsets[0].shape[0] - 1
        rows = -(-(q.shape[0] + documents * 128) // 128) * 128
    else:
        rows = q.shape[0] * -(-q.shape[1] // 128) * 128
    assert [each.size >= rows * q.shape[-2] for each in scratch] == [True, True]


def _band(queries: int, keys: int, q_len: Any, kv_len: Any, how: dict[str, Any], at: Any = None) -> Any:
    """Returns which keys each query sees, ``[queries, keys]``; ``at``: their positions in their documents."""
    longest_q, longest_k = how.get("max_seqlen", queries), how.get("max_seqlen_k", keys)
    left, right = how["window_size_left"], how["window_size_right"]
    left = -1 if left >= longest_k - 1 else left
    right = -1 if right >= longest_q - 1 else right
    right = 0 if how["is_causal"] else right
    row, key = (jnp.arange(queries), jnp.arange(keys)) if at is None else at
    distance = key - (row + kv_len - q_len)[:, None]
    return ((left < 0) | (distance >= -left)) & ((right < 0) | (distance <= right))


def _documents(queries: int, keys: int, cu_q: Any, cu_k: Any, how: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns which keys each query sees, and which queries and keys belong to a document."""
    row, key = jnp.arange(queries), jnp.arange(keys)
    of_q, of_k = jnp.searchsorted(cu_q[1:], row, side="right"), jnp.searchsorted(cu_k[1:], key, side="right")
    last = cu_q.shape[0] - 2
    mine, its = jnp.minimum(of_q, last), jnp.minimum(of_k, last)
    lengths = (cu_q[mine + 1] - cu_q[mine], cu_k[mine + 1] - cu_k[mine])
    seen = _band(queries, keys, *lengths, how, (row - cu_q[mine], key - cu_k[its]))
    return seen & (of_q[:, None] == of_k) & (of_q <= last)[:, None], of_q <= last, of_k <= last


def _unwritten(array: Any, written: Any, axis: int) -> Any:
    shape = [1] * array.ndim
    shape[axis] = -1
    return jnp.where(written.reshape(shape), array, jnp.nan)


def _grouped(q: Any, kv_heads: int) -> Any:
    return q.astype(jnp.float32).reshape(
        *q.shape[:2], kv_heads, -1, q.shape[-1]
    )  # [batch, q_len, kv_heads, group, dim]


def _scores(seen: Any, scale: Any, q: Any, k: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        scores = scale * jnp.einsum("bihgd,bjhd->bhgij", _grouped(q, k.shape[2]), k.astype(jnp.float32))
    return jnp.where(seen, scores, -jnp.inf)


def _forward(seen: Any, scale: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    scores = _scores(seen, scale, q, k)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(lse == -jnp.inf, 0, lse)[..., None]), 0)
    out = jnp.einsum("bhgij,bjhd->bihgd", weights, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype), lse.reshape(q.shape[0], q.shape[2], q.shape[1])


def _backward(seen: Any, scale: Any, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> tuple[Any, Any, Any]:
    heads = k.shape[2]
    lse = jnp.where(lse == -jnp.inf, 0, lse).reshape(q.shape[0], heads, -1, q.shape[1])
    weights = jnp.where(seen, jnp.exp(_scores(seen, scale, q, k) - lse[..., None]), 0)
    dout, out = _grouped(dout, heads), _grouped(out, heads)
    delta = jnp.einsum("bihgd,bihgd->bhgi", dout, out)
    dscores = weights * (jnp.einsum("bihgd,bjhd->bhgij", dout, v.astype(jnp.float32)) - delta[..., None]) * scale
    dq = jnp.einsum("bhgij,bjhd->bihgd", dscores, k.astype(jnp.float32)).reshape(q.shape)
    dk = jnp.einsum("bhgij,bihgd->bjhd", dscores, _grouped(q, heads))
    dv = jnp.einsum("bhgij,bihgd->bjhd", weights, dout)
    return tuple(each.astype(q.dtype) for each in (dq, dk, dv))
