"""apply_rotary: rotary position embeddings of queries and keys, for JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from attn_core.call.arguments import ArrayFacts
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.options import check_flag
from attn_core.paged import rotary
from jax_frontend.dispatch import partitioning, plan
from jax_frontend.paged.tables import copy_numpy

Array = jax.Array


@hide_unknown
def apply_rotary(
    x: Array, cos: Array, sin: Array, *, positions: Array | np.ndarray, interleaved: bool = False, **unknown: Never
) -> Array:
    """Rotates pairs of channels by angles that depend on each token's position: a rotary embedding.

    Args:
        x: ``[..., heads, head_dim]``, queries or keys, such as ``[tokens, heads, head_dim]``.
        cos, sin: ``[max_positions, rotary_dim / 2]``, of the angles; rotary_dim is at most head_dim, and channels
            behind it do not change. Any float dtype; float64 for a float64 x alone.
        positions: int32 or int64 ``[...]``, one for each token of x; a JAX or a numpy array.
        interleaved: whether the pairs are channels ``(2i, 2i + 1)``, as in GPT-J, and not ``(i, i + rotary_dim / 2)``,
            as in GPT-NeoX and Llama.

    Returns:
        An array like x. It is computed in float32 (a float64 x in float64) and rounded once. torch, our GPU kernel and
        JAX return the same bits; ``append_kv(rotary=)`` writes them, too.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments. Positions on the host are checked;
            others are clamped to the rows of cos.
    """
    if unknown:
        refuse_keywords(apply_rotary, unknown)
    check_flag("interleaved", interleaved)
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        plan.check_array(name, array)
    if not isinstance(positions, np.ndarray):
        plan.check_array("positions", positions)
    device = plan.device_name(x)
    named = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    rotary.check_apply({name: ArrayFacts(tuple(a.shape), str(a.dtype), device) for name, a in named.items()})
    if plan.is_on_host(positions) and x.size:
        rotary.check_position_values(np.asarray(positions), cos.shape[0])
    return _jit_rotate(x, cos, sin, copy_numpy(positions), interleaved, x.dtype)  # type: ignore[no-any-return]


def rotate(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool, dtype: DTypeLike) -> Array:
    """Returns x ``[..., heads, head_dim]`` rotated, rounded once to a dtype."""
    kind = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    rows = jnp.clip(positions, 0, cos.shape[0] - 1)
    cosine, sine = (table[rows].astype(kind)[..., None, :] for table in (cos, sin))  # [..., 1, rotary_dim / 2]
    width = 2 * cos.shape[1]
    wide, rest = x[..., :width].astype(kind), x[..., width:]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else jnp.split(wide, 2, -1)
    turned = _turn(first, second, cosine, sine)
    pairs = jnp.stack(turned, -1).reshape(wide.shape) if interleaved else jnp.concatenate(turned, -1)
    return jnp.concatenate((pairs.astype(dtype), rest.astype(dtype)), -1)


@partial(jax.jit, static_argnums=(4, 5), inline=True)
def _jit_rotate(x: Array, cos: Array, sin: Array, positions: Array, interleaved: bool, dtype: DTypeLike) -> Array:
    run = partial(rotate, interleaved=interleaved, dtype=dtype)
    return partitioning.run_like(run, x, x, cos, sin, positions)  # type: ignore[no-any-return]


@jax.custom_jvp
def _turn(first: Array, second: Array, cosine: Array, sine: Array) -> tuple[Array, Array]:
    """Returns pairs turned by angles; each product and each sum is rounded by itself."""
    of_first, of_second = partial(_rounded_product, first), partial(_rounded_product, second)
    return of_first(cosine) - of_second(sine), of_second(cosine) + of_first(sine)


@_turn.defjvp
def _turn_tangents(primals: Any, tangents: Any) -> Any:
    """The derivative of what ``_turn`` computes; the bits of ``_rounded_product`` have none."""
    first, second, cosine, sine = primals
    dfirst, dsecond, dcosine, dsine = tangents
    of_channels = dfirst * cosine - dsecond * sine, dsecond * cosine + dfirst * sine
    of_angles = first * dcosine - second * dsine, second * dcosine + first * dsine
    return _turn(*primals), tuple(one + other for one, other in zip(of_channels, of_angles, strict=True))


def _rounded_product(x: Array, factor: Array) -> Array:
    """Returns the rounded product of two float arrays.

    XLA's compilers fuse a product and the sum behind it into one operation that rounds once. So the bits of the product
    are combined with a number that is 0 unless x is one pattern of a NaN, which compilers do not know.
    """
    bits, nan = (jnp.int64, 0x7FF8ABCD << 32) if x.dtype == jnp.float64 else (jnp.int32, 0x7FCD0000)
    as_bits = partial(jax.lax.bitcast_convert_type, new_dtype=bits)
    unknown = (as_bits(x) == jnp.asarray(nan, bits)).astype(bits)
    return jax.lax.bitcast_convert_type(as_bits(x * factor) ^ unknown, x.dtype)  # type: ignore[no-any-return]
