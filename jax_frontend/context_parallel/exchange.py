"""The collectives of context parallelism: heads for positions, a ring of blocks, all-gather, and gradients back.

Arrays are ``[batch, places, heads, dim]``. Every function runs inside ``jax.shard_map``. JAX never differentiates them,
because the backward of context parallelism is explicit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.dispatch.local_call import varying_as
from jax_frontend.dispatch.partitioning import partly_manual

Array = jax.Array


def heads_to_positions(axes: RankAxes, array: Array) -> Array:
    """Exchanges this member's positions of all heads for all positions of this member's heads.

    Takes ``[batch, shard, members * heads, dim]``; returns ``[batch, members * shard, heads, dim]``.
    """
    if axes.inner is None:
        return array
    # tiled: the axes are split and joined in place. Otherwise the result would have an axis more.
    return lax.all_to_all(array, axes.inner, split_axis=2, concat_axis=1, tiled=True)


def positions_to_heads(axes: RankAxes, array: Array) -> Array:
    """The inverse of ``heads_to_positions``."""
    if axes.inner is None:
        return array
    return lax.all_to_all(array, axes.inner, split_axis=1, concat_axis=2, tiled=True)


def gather(axes: RankAxes, k: Array, v: Array) -> tuple[Array, ...]:
    """Gathers k and v, ``[batch, places, ...]``, of every part; ``unpack_gathered`` takes the result apart.

    If k and v have one shape, they travel as one array ``[parts, 2, batch, places, ...]``. Two parts swap their arrays:
    each gets ``[1, ...]``, the other part's.
    """
    assert axes.outer is not None
    if axes.swap:
        return tuple(array[None] for array in KVPair.pack(k, v).hop(axes, 1).arrays)
    return tuple(lax.all_gather(array, axes.outer) for array in KVPair.pack(k, v).arrays)


def unpack_gathered(gathered: tuple[Array, ...]) -> tuple[Array, Array]:
    """Returns k and v, ``[batch, parts * places, ...]``, from the result of ``gather``."""
    pair = [gathered[0][:, 0], gathered[0][:, 1]] if len(gathered) == 1 else gathered
    k, v = (array.swapaxes(0, 1).reshape(array.shape[1], -1, *array.shape[3:]) for array in pair)
    return k, v


def send_gradients(axes: RankAxes, dk: Array, dv: Array, dtype: DTypeLike) -> tuple[Array, Array]:
    """Sends every part the gradients of its keys, and returns the sums of the gradients that arrive.

    dk and dv have the shapes that ``unpack_gathered`` returns. The sums are computed in ``dtype``, in the order of
    parts. With two parts, each receives one array and there is no sum.
    """
    assert axes.outer is not None
    if axes.swap:
        dk, dv = KVPair.pack(dk, dv).hop(axes, 1).unpack()
        return dk.astype(dtype), dv.astype(dtype)
    # [batch, parts * places, ...] -> [parts, batch, places, ...]
    first, second = (x.reshape(x.shape[0], axes.parts, -1, *x.shape[2:]).swapaxes(0, 1) for x in (dk, dv))
    # One message instead of two, if dk and dv fit into one array.
    sent = [_stack(first, second, 1)] if dk.shape == dv.shape else [first, second]
    return KVPair(tuple(lax.all_to_all(array, axes.outer, 0, 0).sum(0, dtype=dtype) for array in sent)).unpack()


def _stack(one: Array, other: Array, axis: int) -> Array:
    """``jnp.stack`` by two copies, because XLA's concatenation takes twice as long on a GPU.

    Inside a ``jax.shard_map`` over only some axes of a mesh it is ``jnp.stack``, because the new buffer would have to
    be split as the arrays are.
    """
    if partly_manual():
        return jnp.stack((one, other), axis)
    shape = (*one.shape[:axis], 2, *one.shape[axis:])
    stacked = varying_as((one, other), lax.empty(shape, one.dtype))
    for at, array in enumerate((one, other)):
        stacked = lax.dynamic_update_slice_in_dim(stacked, jnp.expand_dims(array, axis), at, axis)
    return stacked


class KVPair(NamedTuple):
    """Keys and values, or their gradients, that travel together: one array ``[2, ...]`` if they have one shape."""

    arrays: tuple[Array, ...]

    @classmethod
    def pack(cls, k: Array, v: Array) -> KVPair:
        """Packs two arrays."""
        return cls((_stack(k, v, 0),) if k.shape == v.shape else (k, v))

    def unpack(self) -> tuple[Array, Array]:
        """Returns the two arrays."""
        k, v = self.arrays[0] if len(self.arrays) == 1 else self.arrays
        return k, v

    def hop(self, axes: RankAxes, distance: int) -> KVPair:
        """Sends the pair ``distance`` parts on, in a ring; returns the pair that arrives from as far behind."""
        # The pair stays where it is.
        if axes.outer is None or distance % axes.parts == 0:
            return self
        ring = [(part, (part + distance) % axes.parts) for part in range(axes.parts)]
        return KVPair(tuple(lax.ppermute(array, axes.outer, ring) for array in self.arrays))
