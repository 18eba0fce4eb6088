"""What backends in JAX have in common: promotion, documents of packed tokens, sinks, and the precision of products.

Traceable, under JAX's usual promotion. The formulas of sinks and their source are in ``shared.rewrites``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import numpy as np
    from jax.lax import Precision


@contextmanager
def usual_promotion() -> Iterator[None]:
    """Sets JAX's default promotion of ranks and dtypes inside a block, whatever the caller has set."""
    import jax

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def document_numbers(ends: jax.Array, count: int) -> jax.Array:
    """Returns int32 ``[count]``: how many documents end at or before each position, which is its document's number.

    Args:
        ends: ``[documents]`` integers in any order, the position after each document's last token. Values out of range
            are clamped.
    """
    import jax.numpy as jnp
    from jax import lax

    at = jnp.clip(ends.astype(jnp.int32), 0, count)
    # An end at ``count`` goes to one more entry, which is cut off.
    return lax.cumsum(jnp.zeros(count + 1, jnp.int32).at[at].add(1))[:count]


def safe_offsets(cu_seqlens: jax.Array, tokens: int, *, whole: bool = True) -> jax.Array:
    """Returns offsets that start at 0, never decrease and end at ``tokens``, for any input. Valid offsets stay as is.

    Offsets of a traced array cannot be checked, and wrong ones would make a kernel read outside its buffers.

    whole: if False, the offsets may also end before ``tokens``.
    """
    import jax.numpy as jnp
    from jax import lax

    bounded = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens).at[0].set(0)
    return lax.cummax(bounded.at[-1].set(tokens) if whole else bounded)


def with_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds one logit per head, ``[heads]``, to the softmax of (out, lse). Rows that see no key keep 0 and -inf."""
    import jax
    import jax.numpy as jnp

    logits = sinks.astype(lse.dtype)[:, None]  # [heads, 1] against [..., heads, rows]
    empty = lse == -jnp.inf
    gate = jnp.where(empty, 0, jax.nn.sigmoid(lse - logits))  # of two -inf the sigmoid is NaN
    by_row = gate.swapaxes(-1, -2)[..., None]  # [..., heads, rows] -> [..., rows, heads, 1]
    return (out.astype(lse.dtype) * by_row).astype(out.dtype), jnp.where(empty, lse, jnp.logaddexp(lse, logits))


def sink_gradient(
    sinks: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None = None
) -> jax.Array:
    """Returns the gradient of the sinks, ``[heads]``, from out and lse with sinks; dlse is None if nothing needs lse.

    A row that sees no key adds nothing, whatever its dout is.
    """
    import jax.numpy as jnp

    share = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)  # [heads, 1] against [..., heads, rows]
    delta = (dout.astype(lse.dtype) * out.astype(lse.dtype)).sum(-1).swapaxes(-1, -2)  # [..., heads, rows]
    total = jnp.where(lse == -jnp.inf, 0, share * (delta if dlse is None else delta - dlse.astype(lse.dtype)))
    rows = tuple(axis for axis in range(total.ndim) if axis != total.ndim - 2)
    return -total.sum(rows).astype(sinks.dtype)


def product_precision(dtype: np.dtype) -> Precision | None:
    """Returns ``precision=`` for products of arrays of a dtype; None defers to ``jax.default_matmul_precision``.

    JAX's own default, DEFAULT, rounds float32 to TF32 on GPUs and to bfloat16 on TPUs. Attention would lose accuracy.
    So float32 is multiplied at HIGHEST unless the caller set a precision. float16 and bfloat16 need no rounding, and
    float64 is always multiplied at HIGHEST.
    """
    from jax.lax import Precision

    if dtype.itemsize == 2 or (dtype.itemsize == 4 and current_precision() is not None):
        return None
    return Precision.HIGHEST


def current_precision() -> str | None:
    """Returns the current ``jax.default_matmul_precision``; None if it is not set."""
    import jax

    config: Any = jax.config
    return config.jax_default_matmul_precision


def current_precision_level() -> int:
    """Returns the current precision of float32 products: 0 DEFAULT, 1 HIGH, 2 HIGHEST; 0 for a named algorithm."""
    from jax.lax import Precision

    setting = current_precision()
    try:
        # Unset means HIGHEST here; see ``product_precision``.
        return int(Precision.HIGHEST.value if setting is None else Precision(setting).value)
    except ValueError:  # the name of a lax.DotAlgorithmPreset
        return 0
