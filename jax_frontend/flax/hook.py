"""attention_fn: the attention function for Flax's own layers, linen and NNX alike.

Flax's layers call an ``attention_fn`` with their projected heads. linen passes only the keywords that the function's
signature names, so a function with ``**kwargs`` silently loses the mask; NNX passes all of its keywords. The signature
here therefore names every keyword of both, and each is honoured or raises an error with its name. Flax's own function
scales by ``1/sqrt(head_dim)``, and so does this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from attn_core.call.hints import refuses_other_options
from attn_core.call.layers import ON_ROWS, options_of
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError, SpecError, shown
from jax_frontend.attention import attention
from jax_frontend.dispatch.plan import as_array, check_array
from jax_frontend.flax.layer import Rotary, check_precision, four_axes, row_positions, token_positions

_ARRAYS = ("alibi_slopes", "sinks", "seq_info")  # compared by identity, see _identity


@refuses_other_options
@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionFn:
    """A function for ``flax.linen.MultiHeadDotProductAttention(attention_fn=...)`` or NNX's MultiHeadAttention.

    ``attention_fn(...)`` makes one. Two are equal if their options are (arrays: the same object), for jit's cache. The
    options are those of ``jax_frontend.attention``, fixed for every call of the layer, except:

    Args:
        alignment: where the diagonal lies if queries and keys differ in length. None means Flax's own (top_left) for
            Flax's ``is_causal``, and bottom_right inside the documents of a seq_info. For a causal, window or
            alibi_slopes option, None raises an error if the lengths differ. A layer in decode mode is such a call: its
            cache is longer than its one query, and only the mask knows the query's position.
        rotary: ``(q, k, positions) -> (q, k)``, as in our ``Attention`` layers: applied to the projected heads, with
            the positions from the layer's call (``input_positions`` of ``flax.nnx``), else with positions that count
            from each row's or document's start. Raises an error if queries and keys differ in length, as in decode
            mode.
        bitwise_deterministic: the same bits on every run (``deterministic=`` in ``jax_frontend.attention``); in Flax
            ``deterministic`` means "no dropout".

    A query that may see no key gets 0 here, and the mean of the values from Flax's own functions.
    """

    causal: bool = False
    alignment: str | None = None
    window: int | tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float | None = None
    alibi_slopes: Any = None
    sinks: Any = None
    seq_info: Any = None
    rotary: Rotary | None = None
    bitwise_deterministic: bool = False
    backend: str | tuple[str, ...] | None = None
    invariant: str | None = None

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: DTypeLike | None = None,
        precision: Any = None,
        module: object = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: object = None,
        qk_attn_weights_einsum: object = None,
        attn_weights_value_einsum: object = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Computes attention as Flax's ``dot_product_attention`` defines it.

        Args:
            query: ``[batch..., q_len, heads, head_dim]``, with any number of batch axes, or none.
            key, value: ``[batch..., kv_len, kv_heads, head_dim or value_dim]``.
            bias: added to the scores; broadcastable to ``[batch..., heads, q_len, kv_len]``.
            mask: the same shapes, of any dtype; nonzero = visible.
            broadcast_dropout: raises an error with dropout, because each weight is dropped independently here.
            dropout_rng, dropout_rate, deterministic: drop weights if the rate is not 0 and deterministic is False.
            dtype: query, key and value are cast to it; None: to the dtype they promote to.
            precision: a ``jax.lax.Precision`` or its name. float32 is multiplied at HIGHEST, unless
                ``jax.default_matmul_precision`` is lower; a higher precision than that raises an error. Other dtypes do
                not change.
            module: raises an error: attention weights are never in memory, so there is nothing to sow.
            force_fp32_for_softmax: ignored, because the softmax is always in float32 (float64 for float64).
            einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: raise an error: kernels run no
                einsum.
            promote_dtype: NNX's ``promote_dtype((query, key, value), dtype=dtype)``, used instead of the cast above.
            is_causal: query ``i`` sees keys ``0..i`` (top_left); raises an error for one query of a cache.
            input_positions: ints ``[batch..., length]`` for rotary; raises an error without rotary.

        Returns:
            ``[batch..., q_len, heads, value_dim]``.

        Raises:
            SpecError, ShapeError: naming the keyword that cannot be honoured.
            NoBackendError: if no backend can run the call; the message has every reason.
        """
        _refuse_weights(module, einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum)
        query, key, value = promote((query, key, value), dtype, promote_dtype)
        check_precision(precision, query.dtype)  # after the promotion, because only float32 has a precision
        batch = _batch_axes(query, key, value)
        if not isinstance(deterministic, bool | np.bool_ | jax.Array | int | None):
            raise SpecError(f"deterministic={shown(deterministic)}: expected True or False")
        dropping = not deterministic and dropout_rate != 0  # in Flax deterministic means no dropout
        if dropping:
            _check_dropout(broadcast_dropout, dropout_rng, dropout_rate)
        query, key, value = (array.reshape(math.prod(batch), *array.shape[-3:]) for array in (query, key, value))
        _check_positions(input_positions, self.rotary, query.shape[1], key.shape[1])
        if is_causal and self.alignment is None:
            _check_one_causal_query(query.shape[1], key.shape[1], mask)
        if self.rotary is not None:
            query, key = self._rotate(
                query, key, row_positions("input_positions", input_positions, batch, query.shape[1])
            )
        options = options_of(self, ON_ROWS)
        options["causal"] = self.causal or is_causal
        options["alignment"] = self._alignment(query.shape[-3], key.shape[-3])
        out = attention(
            query,
            key,
            value,
            **options,
            mask=None if mask is None else four_axes("mask", as_array("mask", mask).astype(bool), batch),
            bias=None if bias is None else four_axes("bias", as_array("bias", bias), batch),
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            seq_info=self.seq_info,
            dropout=dropout_rate if dropping else 0.0,
            dropout_rng=dropout_rng if dropping else None,
        )
        return out.reshape(*batch, *out.shape[-3:])

    def _alignment(self, q_len: int, kv_len: int) -> str:
        """Returns the alignment option, or else Flax's alignment if no option of ours depends on it."""
        if self.alignment is not None:
            return self.alignment
        if q_len == kv_len or self.seq_info is not None:
            return "bottom_right"
        aligned = {
            "causal": self.causal,
            "window": self.window is not None,
            "alibi_slopes": self.alibi_slopes is not None,
        }
        for name in (name for name, is_set in aligned.items() if is_set):
            raise SpecError(
                f"alignment=None: expected 'bottom_right' or 'top_left' for {name}= with {q_len} queries and {kv_len} "
                "keys; pass attention_fn(..., alignment=...). In decode mode neither is right, because the query "
                "stands at the cache's index: put causal and window into the layer's mask"
            )
        return "top_left"

    def _rotate(self, query: jax.Array, key: jax.Array, positions: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Rotates q and k, ``[batch, length, heads, head_dim]`` each, and casts them back to their own dtypes."""
        assert self.rotary is not None
        positions = token_positions(positions, SeqInfo.coerce(self.seq_info), *query.shape[:2])
        rotated = self.rotary(query, key, positions)
        return rotated[0].astype(query.dtype), rotated[1].astype(key.dtype)

    def _identity(self) -> tuple[object, ...]:
        # Arrays count by id, because comparing values would wait for the device, and traced arrays have no values.
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple(id(value) if name in _ARRAYS else value for name, value in named)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionFn) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


attention_fn = AttentionFn
"""The name under which Flax's layers take such a function."""


def _batch_axes(query: jax.Array, key: jax.Array, value: jax.Array) -> tuple[int, ...]:
    """Returns the batch axes, which all three arrays must have in common."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 3:
            raise ShapeError(f"{name}: expected [batch..., length, heads, head_dim], got {list(array.shape)}")
        if array.shape[:-3] != query.shape[:-3]:
            raise ShapeError(
                f"{name}: expected the batch axes of query {list(query.shape[:-3])}, got {list(array.shape[:-3])}"
            )
    return query.shape[:-3]


def promote(
    arrays: tuple[jax.Array, ...], dtype: DTypeLike | None, promote_dtype: Callable[..., Any] | None
) -> tuple[jax.Array, ...]:
    """Returns query, key and value in ``dtype``, or in the dtype to which they promote.

    Args:
        promote_dtype: NNX's function, used instead.

    Raises:
        TypeError, SpecError: naming the array, or ``dtype``.
    """
    for name, array in zip(("query", "key", "value"), arrays):
        if not isinstance(array, np.ndarray):
            check_array(name, array)
    if dtype is not None:
        try:
            jnp.dtype(dtype)
        except (TypeError, ValueError):
            raise SpecError(f"dtype={shown(dtype)}: expected a dtype, or None") from None
    if promote_dtype is not None:
        return tuple(promote_dtype(arrays, dtype=dtype))
    target = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(array.astype(target) for array in arrays)


def _check_dropout(broadcast_dropout: bool, dropout_rng: jax.Array | None, dropout_rate: float) -> None:
    """Checks the dropout keywords of a call that drops weights."""
    if broadcast_dropout:
        raise SpecError(
            f"broadcast_dropout=True with dropout_rate={dropout_rate}: every softmax weight is dropped on its own "
            "here, and no kernel shares one dropout mask over batch and heads; build the layer with "
            "broadcast_dropout=False"
        )
    if dropout_rng is None:
        raise SpecError(f"dropout_rng=None: expected a JAX random key for dropout_rate={dropout_rate}")


def _refuse_weights(module: object, dot_general: object, qk_einsum: object, value_einsum: object) -> None:
    """Raises SpecError for keywords that need the matrix of attention weights."""
    if module is not None:
        raise SpecError(
            "module: sow_weights=True asks for the attention weights, which are never in memory here; "
            "call the layer with sow_weights=False"
        )
    einsums = {
        "einsum_dot_general": dot_general,
        "qk_attn_weights_einsum": qk_einsum,
        "attn_weights_value_einsum": value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise SpecError(f"{name}: expected None, because the kernels run no einsum that it could replace")


def _check_one_causal_query(q_len: int, kv_len: int, mask: object) -> None:
    """Raises SpecError if ``is_causal`` without an alignment would let one query see the first key only.

    The layers of flax 0.12.8 call like this in decode mode, with the cache's mask; later versions omit ``is_causal``.
    """
    if q_len == 1 < kv_len and mask is not None:
        raise SpecError(
            f"is_causal=True with 1 query, {kv_len} keys and a mask: counted from the first key (top_left) the query "
            "would see that key alone. In decode mode omit is_causal, because the cache's mask is causal already; "
            "elsewhere pass attention_fn(alignment=...)"
        )


def _check_positions(input_positions: object, rotary: object, q_len: int, kv_len: int) -> None:
    """Checks that positions come with a rotary embedding, and that it gets as many keys as queries."""
    if rotary is None and input_positions is not None:
        raise SpecError(
            "input_positions: expected None without a rotary embedding, because only rotary uses positions; pass "
            "attention_fn(rotary=...)"
        )
    if rotary is not None and q_len != kv_len:
        raise SpecError(
            f"rotary: expected as many keys as queries, got {q_len} queries and {kv_len} keys; the positions of keys "
            "in a cache or a context are not known here: rotate before the layer's attention"
        )
