"""dot_product_attention: ``jax.nn.dot_product_attention`` on every kernel, with the same signature and meaning.

docs/how_to/migrate/jax_nn.md lists the differences. The meaning follows jax/_src/nn/functions.py of jax 0.10 to 0.12.

The lengths of a padded batch never become a matrix of queries and keys. A mask ``[batch, 1, 1, kv_len]`` hides the keys
past a row's end. Queries past it are computed like any other and then set to 0. This also stops their gradients,
because a row with cotangent 0 adds nothing to dq, dk, dv and dbias. A causal call with one array for both lengths needs
no mask, so kernels without masks can run it.
"""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from attn_core.call.arguments import ArrayFacts, check_qkv
from attn_core.call.kinds import check_int32, is_host_int
from attn_core.call.options import check_flag, check_number, requested_names
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from jax_frontend.attention import attention
from jax_frontend.bridge.forked import check_process
from jax_frontend.dispatch import plan

Array = jax.Array

_IMPLEMENTATIONS = {"xla": "jax_xla", "cudnn": "jax_cudnn"}
"""The backends by jax.nn's words. A plug-in that is called so, too, is not what jax.nn means."""


class _Keywords(TypedDict, total=False):
    """The keywords of ``dot_product_attention``, without return_residual."""

    scale: float | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cudnn"] | None
    backend: str | tuple[str, ...] | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Array, Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[_Keywords],
) -> Array | tuple[Array, Array]: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    backend: str | tuple[str, ...] | None = None,
) -> Array | tuple[Array, Array]:
    """Computes ``jax.nn.dot_product_attention`` on the best kernel that honours every argument.

    Args:
        query: ``[batch, q_len, heads, head_dim]``, or one row without the batch axis.
        key: ``[batch, kv_len, kv_heads, head_dim]``; query head h reads kv head ``h // (heads // kv_heads)``.
        value: ``[batch, kv_len, kv_heads, value_dim]``. query, key, value: all float64, float32, bfloat16 or float16.
        bias: float, added to the scaled scores; broadcastable to ``[batch, heads, q_len, kv_len]``.
        mask: bool, True = visible; the same shapes.
        scale: factor on ``query . key``, which may be traced; ``1 / sqrt(head_dim)`` if None.
        is_causal: query i sees keys 0 to i, whatever the lengths (``alignment="top_left"`` in ``attention``).
        query_seq_lengths: int32 ``[batch]``, may be traced: queries from this index on have output 0 and no gradient.
        key_value_seq_lengths: int32 ``[batch]``, may be traced: no query sees keys from this index on.
        local_window_size: inclusive distances ``(left, right)`` around key i; an int is both.
        implementation: "xla" and "cudnn" mean ``backend="jax_xla"`` and ``"jax_cudnn"``; None chooses.
        return_residual: also return the log-sum-exp.
        backend: (ours) as in ``attention``: a name, which runs or raises; names in order of preference; or None.

    Returns:
        The output, with query's shape and value_dim channels. With return_residual ``(out, residual)``, where residual
        is the log-sum-exp ``[batch, q_len, heads]`` in query's dtype, without a gradient. It is -inf for a query that
        sees no key or lies past its row's end. It lacks the batch axis if query does.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument that is invalid or not supported here.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    arrays = {"query": query, "key": key, "value": value}
    query, key, value = (_array(name, array) for name, array in arrays.items())
    shape = query.shape  # if query has no batch axis, neither has the result
    query, key, value = (_with_batch(name, array) for name, array in zip(arrays, (query, key, value), strict=True))
    # Before attention checks them, because its errors would name q, k and v.
    q, k, v = (ArrayFacts(array.shape, str(array.dtype), "") for array in (query, key, value))
    check_qkv(q, k, v, names=("query", "key", "value"))
    queries_inside = _inside("query_seq_lengths", query_seq_lengths, query)
    keys_inside = _inside("key_value_seq_lengths", key_value_seq_lengths, key)
    if is_causal and query_seq_lengths is key_value_seq_lengths:
        keys_inside = None  # query i < length sees keys j <= i < length: causal hides all others already
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])  # [batch, heads, q_len, kv_len]
    results: Any = attention(
        query,
        key,
        value,
        causal=check_flag("is_causal", is_causal),
        # jax.nn counts the positions of queries and keys from 0, whatever the lengths.
        alignment="top_left",
        window=_window(local_window_size),
        scale=scale if isinstance(scale, jax.Array) else check_number("scale", scale),
        mask=_visible(None if mask is None else _array("mask", mask), keys_inside, scores),
        bias=None if bias is None else _array("bias", bias),
        backend=_requested(implementation, backend),
        return_lse=check_flag("return_residual", return_residual),
    )
    out, lse = results if return_residual else (results, None)
    if queries_inside is not None:
        out = jnp.where(queries_inside[:, :, None, None], out, jnp.zeros_like(out))
    out = out.reshape(*shape[:-1], value.shape[-1])
    if lse is None:
        return out
    return out, _residual(lse, queries_inside, query.dtype).reshape(shape[:-1])


def _array(name: str, value: ArrayLike) -> Array:
    """Converts everything that jax.nn accepts as an array; raises for a torch tensor, whose gradient would be lost."""
    check_process()
    if type(value).__module__.partition(".")[0] == "torch":
        plan.check_array(name, value)
    return plan.as_array(name, value)


def _with_batch(name: str, array: Array) -> Array:
    if array.ndim not in (3, 4):
        raise ShapeError(
            f"{name}: expected [batch, length, heads, head_dim] or [length, heads, head_dim], got {list(array.shape)}"
        )
    return array if array.ndim == 4 else array[None]  # [length, heads, dim] -> [1, length, heads, dim]


def _inside(name: str, lengths: ArrayLike | None, tokens: Array) -> Array | None:
    """Returns, as bool ``[batch, length]``, whether each token lies before its row's end; None without lengths."""
    if lengths is None:
        return None
    lengths, (batch, longest) = _array(name, lengths), tokens.shape[:2]
    check_int32(name, lengths.dtype)
    if lengths.shape != (batch,):
        raise ShapeError(f"{name}: expected one length per row, shape [{batch}], got {list(lengths.shape)}")
    return jnp.arange(longest, dtype=jnp.int32)[None, :] < lengths[:, None]


def _visible(mask: Array | None, keys_inside: Array | None, scores: tuple[int, ...]) -> Array | None:
    """Combines the caller's mask and the keys inside their rows; without a mask, one row serves all queries."""
    if keys_inside is None:  # with four axes, because attention refuses fewer if they could be those of the batch
        return mask if mask is None or mask.ndim >= 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    keys_inside = keys_inside[:, None, None, :]  # [batch, kv_len] -> [batch, 1, 1, kv_len]
    if mask is None:
        return keys_inside
    if mask.dtype != jnp.bool_:
        raise DTypeError(f"mask: expected dtype bool (True = visible), got {mask.dtype}; an additive mask is bias=")
    padded = (1,) * (4 - mask.ndim) + mask.shape
    if mask.ndim > 4 or any(size not in (1, full) for size, full in zip(padded, scores, strict=True)):
        raise ShapeError(
            f"mask: expected a shape broadcastable to [batch, heads, q, kv] = {list(scores)}, got {list(mask.shape)}"
        )
    return mask.reshape(padded) & keys_inside


def _window(size: Any) -> tuple[int, int] | None:
    """Returns ``local_window_size`` as inclusive distances to the left and right."""
    if size is None:
        return None
    pair = (size, size) if is_host_int(size) else size
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(is_host_int(side) and side >= 0 for side in pair):
        return int(pair[0]), int(pair[1])
    raise SpecError(
        f"local_window_size={shown(size)}: expected an int or a pair (left, right) of ints known on the host, 0 or more"
    )


def _requested(implementation: object, backend: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Returns the backends that ``implementation``, jax.nn's word, or ``backend`` requests."""
    if implementation is None:
        return backend
    if not isinstance(implementation, str) or implementation not in _IMPLEMENTATIONS:
        raise SpecError(
            f"implementation={shown(implementation)}: expected 'xla', 'cudnn' or None; backend= takes others"
        )
    name = _IMPLEMENTATIONS[implementation]
    if backend is not None and requested_names(backend) != (name,):
        raise SpecError(
            f"implementation={shown(implementation)} with backend={shown(backend)}: they name different kernels; "
            f"implementation={shown(implementation)} is backend={shown(name)}, so pass one of the two"
        )
    return name


def _residual(lse: Array, queries_inside: Array | None, dtype: DTypeLike) -> Array:
    """Returns lse as jax.nn does, ``[batch, heads, q_len]`` -> ``[batch, q_len, heads]``, rounded, without gradient."""
    lse = jnp.swapaxes(lse, 1, 2)
    if queries_inside is not None:
        lse = jnp.where(queries_inside[:, :, None], lse, jnp.full_like(lse, -math.inf))
    return lax.stop_gradient(lse.astype(dtype))
