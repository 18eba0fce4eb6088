"""merge_states: one result from the results of the same queries over parts of the keys, for JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from attn_core.call.arguments import ArrayFacts
from attn_core.paged.merge_states import merged, parts_of
from jax_frontend.dispatch import plan

Array = jax.Array


def merge_states(outs: Sequence[Array] | Array, lses: Sequence[Array] | Array) -> tuple[Array, Array]:
    """Merges the results of attention over parts of the keys into the result over all of them.

    With l the log-sum-exp of all ``lses``, the output is the sum of ``exp(lses[i] - l) * outs[i]``. It is computed in
    the dtype of ``lses`` and rounded once. A part with -inf saw no key and adds nothing, whatever its output is. No key
    may be in two parts. XLA fuses it into one kernel.

    Args:
        outs: the outputs, ``[batch, q_len, heads, value_dim]`` or packed ``[tokens, heads, value_dim]``: a sequence, or
            one array with the parts along its first axis.
        lses: the log-sum-exps in the same form, each ``[batch, heads, q_len]`` or packed ``[heads, tokens]``, natural
            log, float32 or float64, as ``return_lse=True`` gives them. With sinks, only one part may have had them.

    Returns:
        (out, lse) in the shapes and dtypes of one part. A row that no part gave a key has 0 and -inf. Both have
        gradients with respect to all parts.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for parts that do not belong together.
        TypeError: for parts that are no arrays.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    parts, part_lses = parts_of(outs, lses, plan.check_array, _facts)
    return _merge(tuple(parts), tuple(part_lses))  # type: ignore[no-any-return]


def _facts(part: Array) -> ArrayFacts:
    return ArrayFacts(tuple(part.shape), str(part.dtype), plan.device_name(part))


@jax.jit
def _merge(parts: tuple[Array, ...], lses: tuple[Array, ...]) -> tuple[Array, Array]:
    return merged(jnp, parts, lses, jax.lax.convert_element_type, jax.lax.stop_gradient)  # type: ignore[no-any-return]
