"""The sums of rows: what follows from them, and in a backward those of large logits, which an lse does not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attn_core.backends.jax_xla.products import all_finite
from attn_core.backends.jax_xla.tiles import XlaOperands, zero_like
from attn_core.call.arithmetic import LARGE_LSE, may_be_large
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import jax


def exact_lse(
    spec: AttentionSpec,
    lse: jax.Array,
    sums: Callable[[], tuple[jax.Array, jax.Array]],
    read: Sequence[jax.Array | None],
    *,
    in_loop: bool = True,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns two numbers for each row, whose sum is the log-sum-exp; the second is 0 but in rows of large logits.

    The second is None if the call has no such rows.

    Args:
        lse: of whole rows.
        sums: returns each row's largest logit, and its sum of exp(logit - largest); called if a row needs them.
        read: what ``sums`` reads, as arrays or their ``zero_like``.
        in_loop: whether a loop of the caller makes a GPU's host wait, as a branch does.
    """
    import jax.numpy as jnp
    from jax import lax

    if spec.partial or not may_be_large(spec):  # the rest of a partial row is elsewhere
        return lse, None
    large = jnp.isfinite(lse) & (jnp.abs(lse) >= LARGE_LSE)

    def exact() -> tuple[jax.Array, jax.Array]:
        top, total = sums()
        return jnp.where(large, top, lse), jnp.where(large, jnp.log(total), 0)

    def rounded() -> tuple[jax.Array, jax.Array]:
        zeros = jnp.zeros_like(lse) + zero_like((*read, lse)).astype(lse.dtype)
        return lse + zeros, zeros

    def usual() -> tuple[jax.Array, jax.Array]:
        return lax.cond(all_finite(jnp.where(large, jnp.inf, 0)), rounded, exact)

    if in_loop:
        return usual()
    return lax.platform_dependent(cpu=usual, default=exact)


def log_weights(logits: jax.Array, lse: jax.Array, rest: jax.Array | None) -> jax.Array:
    """Returns the logarithms of weights; lse and rest are of ``exact_lse``."""
    return logits - lse if rest is None else logits - lse - rest


def with_sink(sinks: jax.Array | None, top: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest logit and the sum with the sink, for rows that see a key; 0 and 1 for a row without either.

    The largest logit is a constant for forward mode; see ``attention._attend``.
    """
    import jax.numpy as jnp
    from jax import lax

    largest = top if sinks is None else lax.stop_gradient(jnp.maximum(top, sinks))
    base, total, _ = joined(sinks, top, total, largest)
    return base, jnp.where(total == 0, 1, total)


def joined(
    sinks: jax.Array | None, top: jax.Array, total: jax.Array, largest: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the base of rows that a sink joins, or None, their total, and the factor of the sums so far.

    Args:
        largest: the larger of top and sinks.
    """
    import jax.numpy as jnp

    base = jnp.where(largest == -jnp.inf, 0, largest)
    fade = jnp.exp(top - base)
    return base, fade * total if sinks is None else fade * total + jnp.exp(sinks - base), fade


def finish(
    spec: AttentionSpec, call: XlaOperands, top: jax.Array, total: jax.Array, summed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Adds the sink and divides by the total. A row that saw no key has top -inf and gets 0 and -inf."""
    import jax.numpy as jnp

    empty = total == 0  # not top == -inf: XLA may drop a NaN from a maximum, and a row that saw one is not empty
    if spec.sinks:
        top, total, fade = joined(call.sinks, top, total, jnp.maximum(top, call.sinks))
        summed = fade[..., None] * summed
    total = jnp.where(empty, 1, total)
    out = jnp.where(empty[..., None], 0, summed / total[..., None])
    return out.astype(spec.dtype), jnp.where(empty, -jnp.inf, top + jnp.log(total))


def sinks_gradient(call: XlaOperands, lse: jax.Array, shift: jax.Array) -> jax.Array:
    """Returns ``[heads]``: the sum of each row's sink weight ``exp(sink - lse)`` times its shift; empty rows add 0."""
    import jax.numpy as jnp

    weights = jnp.where(lse == -jnp.inf, 0, jnp.exp(call.sinks - lse))
    return jnp.where(lse == -jnp.inf, 0, weights * shift).sum((0, 3)).reshape(-1)
