"""Offsets of packed documents in JAX: clamps them into range, and computes each token's document number."""

from __future__ import annotations

from typing import Any


def document_numbers(ends: Any, count: int) -> Any:
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


def safe_offsets(cu_seqlens: Any, tokens: int, *, whole: bool = True) -> Any:
    """Returns offsets that start at 0, never decrease and end at ``tokens``, for any input. Valid offsets stay as is.

    Offsets of a traced array cannot be checked, and wrong ones would make a kernel read outside its buffers.

    whole: if False, the offsets may also end before ``tokens``.
    """
    import jax.numpy as jnp
    from jax import lax

    bounded = jnp.clip(cu_seqlens.astype(jnp.int32), 0, tokens).at[0].set(0)
    return lax.cummax(bounded.at[-1].set(tokens) if whole else bounded)
