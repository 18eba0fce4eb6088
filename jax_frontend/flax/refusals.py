"""Raises errors for the keywords of Flax's layers that no kernel can honour. Each error names its keyword."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from attn_core.backends.shared.in_jax.xla_precision import current_precision, current_precision_level
from attn_core.errors import SpecError, shown


def check_dropout(broadcast_dropout: bool, dropout_rng: Any, dropout_rate: float) -> None:
    """Checks the dropout keywords of a call that drops weights."""
    if broadcast_dropout:
        raise SpecError(
            f"broadcast_dropout=True with dropout_rate={dropout_rate}: every softmax weight is dropped on its own "
            "here, and no kernel shares one dropout mask over batch and heads; build the layer with "
            "broadcast_dropout=False"
        )
    if dropout_rng is None:
        raise SpecError(f"dropout_rng=None: expected a JAX random key for dropout_rate={dropout_rate}")


def check_precision(precision: Any, dtype: Any) -> None:
    """Checks a ``jax.lax.Precision``, its name, or a pair of them. JAX uses a precision in float32 only.

    Every kernel multiplies float32 as precisely as HIGHEST, except ``jax_xla`` under a lower
    ``jax.default_matmul_precision``. A layer that requests more than that default raises an error.
    """
    # A pair has a precision for each operand of a product.
    for each in precision if isinstance(precision, tuple) else (precision,):
        try:
            level = lax.Precision(each).value
        except (ValueError, TypeError, NotImplementedError):  # for one that cannot be hashed or compared
            raise SpecError(
                f"precision={shown(precision)}: expected None, a jax.lax.Precision or its name; kernels choose the "
                "algorithm of their multiplications"
            ) from None
        if dtype == jnp.float32 and level > current_precision_level():
            raise SpecError(
                f"precision={shown(precision)}: jax.default_matmul_precision is {current_precision()!r} here, and a "
                "layer cannot ask for more; raise it, or leave it unset (then float32 is multiplied at HIGHEST)"
            )


def refuse_weights(module: Any, dot_general: Any, qk_einsum: Any, value_einsum: Any) -> None:
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


def check_one_causal_query(q_len: int, kv_len: int, mask: Any) -> None:
    """Raises SpecError if ``is_causal`` without an alignment would let one query see the first key only.

    The layers of flax 0.12.8 call like this in decode mode, with the cache's mask; later versions omit ``is_causal``.
    """
    if q_len == 1 < kv_len and mask is not None:
        raise SpecError(
            f"is_causal=True with 1 query, {kv_len} keys and a mask: counted from the first key (top_left) the query "
            "would see that key alone. In decode mode omit is_causal, because the cache's mask is causal already; "
            "elsewhere pass attention_fn(alignment=...)"
        )


def check_positions(input_positions: Any, rotary: Any, q_len: int, kv_len: int) -> None:
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
