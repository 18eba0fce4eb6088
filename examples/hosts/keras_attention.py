"""dot_product_attention: the function of ``keras.ops``, for Keras 3 on JAX; ``with installed():`` puts it into Keras.

Copy this file into your project. Keras's attention layers look the function up in its JAX backend at every call, so
while it is installed a whole model runs on our kernels. Keras is imported by ``install`` and ``installed`` only.
docs/how_to/migrate/keras.md lists every argument.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend import attention

__all__ = ["dot_product_attention", "install", "installed", "uninstall"]

NAME = "dot_product_attention"


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> jax.Array:
    """Computes ``keras.ops.dot_product_attention`` with the attention of ``jax_frontend``.

    Args:
        query: ``[batch, q_len, heads, head_dim]``: an array, or a variable of Keras.
        key: ``[batch, kv_len, kv_heads, head_dim]``; query head h reads kv head ``h // (heads // kv_heads)``.
        value: ``[batch, kv_len, kv_heads, value_dim]``. query, key and value are cast to the dtype they promote to.
        bias: added to the scaled scores; broadcastable to ``[batch, heads, q_len, kv_len]``.
        mask: nonzero = visible; the same shapes.
        scale: factor on ``query . key``; ``1 / sqrt(head_dim)`` if None.
        is_causal: query i sees keys 0 to i, whatever the lengths.
        flash_attention: False runs ``jax_xla``, as Keras then runs XLA's own attention; None and True choose a kernel.
        attn_logits_soft_cap: ``s = cap * tanh(s / cap)``, after the scale and before bias and mask.

    Returns:
        ``[batch, q_len, heads, value_dim]``. A query that sees no key gives 0.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument.
        NoBackendError: if no backend can run the call; the message has every reason.
    """
    arrays = {"query": query, "key": key, "value": value}
    operands = [_four_axes(name, _array(name, array)) for name, array in arrays.items()]
    dtype = jnp.result_type(*operands)
    q, k, v = (array.astype(dtype) for array in operands)
    if flash_attention is not None:
        _flag("flash_attention", flash_attention)
    return attention(
        q,
        k,
        v,
        causal=_flag("is_causal", is_causal),
        alignment="top_left",
        scale=scale,
        softcap=attn_logits_soft_cap,
        mask=None if mask is None else _table("mask", mask, bool),
        bias=None if bias is None else _table("bias", bias, dtype),
        backend=None if flash_attention is None or flash_attention else "jax_xla",
    )


def _array(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: expected an array, got {type(value).__name__}") from None


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SpecError(f"{name}={shown(value)}: expected True or False")
    return value


def _four_axes(name: str, array: jax.Array) -> jax.Array:
    if array.ndim != 4:
        raise ShapeError(
            f"{name}: `dot_product_attention` only supports 4D inputs: expected [batch, length, heads, head_dim], got "
            f"{list(array.shape)}"
        )
    return array


def _table(name: str, array: Any, dtype: Any) -> jax.Array:
    """Returns a mask or bias with four axes, because broadcasting adds axes in front."""
    table = _array(name, array).astype(dtype)
    return table.reshape((1,) * (4 - table.ndim) + table.shape)


@contextmanager
def installed() -> Iterator[None]:
    """Replaces Keras's own function in a block, in every thread. Blocks nest and overlap.

    A model that ``jax.jit`` compiled before the block, such as one after ``fit`` or ``predict``, keeps the attention
    that it was compiled with: call ``model.compile(...)`` again, or enter the block before the first call.

    Raises:
        SpecError: if Keras does not run on JAX.
        ImportError: if Keras is not installed.
    """
    holder = object()
    try:
        _hold(holder)
        yield
    finally:
        _release(holder)


def install() -> None:
    """Replaces Keras's own function until ``uninstall``. Idempotent. Raises as ``installed`` does."""
    _hold(_PROCESS)


def uninstall() -> None:
    """Undoes all calls of ``install``. Running blocks of ``installed`` keep our function until their end."""
    _release(_PROCESS)


_PROCESS = object()  # the holder that install stands for
_lock = threading.Lock()
_holders: set[object] = set()
_before: list[Callable[..., Any]] = []
"""Keras's own function while ours is in its place."""


def _backend_module() -> Any:
    """Returns the module in which ``keras.ops`` looks the function up: ``keras.src.backend.jax.nn``."""
    keras = import_module("keras")
    if keras.backend.backend() != "jax":
        raise SpecError(f"KERAS_BACKEND={shown(keras.backend.backend())}: expected 'jax', set before Keras is imported")
    return import_module("keras.src.backend.jax.nn")


def _hold(holder: object) -> None:
    module = _backend_module()
    with _lock:
        if not _before:
            _before.append(getattr(module, NAME))
            setattr(module, NAME, dot_product_attention)
        _holders.add(holder)


def _release(holder: object) -> None:
    with _lock:
        _holders.discard(holder)
        if _holders or not _before:
            return
        module, before = _backend_module(), _before.pop()
        # Another library's function that replaced ours stays.
        if getattr(module, NAME) is dot_product_attention:
            setattr(module, NAME, before)
