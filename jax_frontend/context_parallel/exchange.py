"""The collectives of context parallelism: heads for positions, a ring of blocks, all-gather, and gradients back.

Arrays are ``[batch, places, heads, dim]``. Every function runs inside ``jax.shard_map``. JAX never differentiates them,
because the backward of context parallelism is explicit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.context_parallel.plan import parts_and_members
from jax_frontend.dispatch.local_call import varying_as
from jax_frontend.dispatch.partitioning import partly_manual

Array = jax.Array


class Axes(NamedTuple):
    """The mesh axes that a row is spread over. Rank ``part * members + member`` is a part's member.

    Attributes:
        outer: the axis of the parts, None if there is one part.
        inner: the axis of a part's members, which share its heads; None if a part has one member.
        parts, members: their sizes.
    """

    outer: str | None
    inner: str | None
    parts: int
    members: int

    @classmethod
    def of(cls, names: tuple[str, ...], sizes: tuple[int] | tuple[int, int], strategy: str) -> Axes:
        """The axes as a strategy uses them: "ulysses" uses one axis as the inner one, others as the outer one."""
        inside = len(names) == 2 or strategy == "ulysses"
        return cls(
            names[0] if len(names) == 2 or not inside else None,
            names[-1] if inside else None,
            *parts_and_members(sizes, strategy),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, in the order of ranks."""
        return tuple(name for name in (self.outer, self.inner) if name is not None)

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.parts * self.members

    @property
    def swap(self) -> bool:
        """Whether there are two parts, which swap blocks instead of gathering them; see ``places_in_gathered``."""
        return self.parts == 2

    @property
    def part(self) -> Any:
        """Which part this device belongs to."""
        return 0 if self.outer is None else lax.axis_index(self.outer)

    @property
    def member(self) -> Any:
        """Which member of its part this device is."""
        return 0 if self.inner is None else lax.axis_index(self.inner)

    @property
    def rank(self) -> Any:
        """Which rank this device is."""
        return self.part * self.members + self.member


def heads_to_positions(axes: Axes, array: Array) -> Array:
    """``[batch, shard, members * heads, dim]`` of each member as ``[batch, members * shard, heads, dim]``."""
    if axes.inner is None:
        return array
    return lax.all_to_all(array, axes.inner, split_axis=2, concat_axis=1, tiled=True)


def positions_to_heads(axes: Axes, array: Array) -> Array:
    """The way back: ``[batch, members * shard, heads, dim]`` as ``[batch, shard, members * heads, dim]``."""
    if axes.inner is None:
        return array
    return lax.all_to_all(array, axes.inner, split_axis=1, concat_axis=2, tiled=True)


def gather(axes: Axes, one: Array, other: Array) -> tuple[Array, ...]:
    """Gathers two arrays ``[batch, places, ...]`` of every part; ``unpack_gathered`` takes the result apart.

    Arrays of one shape travel as one array ``[parts, 2, batch, places, ...]``. Two parts swap their arrays: each gets
    ``[1, ...]``, the other part's.
    """
    assert axes.outer is not None
    if axes.swap:
        return tuple(array[None] for array in Pair.of(one, other).hop(axes, 1).arrays)
    return tuple(lax.all_gather(array, axes.outer) for array in Pair.of(one, other).arrays)


def unpack_gathered(gathered: tuple[Array, ...]) -> tuple[Array, Array]:
    """Two arrays ``[batch, parts * places, ...]`` from the result of ``gather``; of two parts, the other's alone."""
    pair = [gathered[0][:, 0], gathered[0][:, 1]] if len(gathered) == 1 else gathered
    one, other = (array.swapaxes(0, 1).reshape(array.shape[1], -1, *array.shape[3:]) for array in pair)
    return one, other


def send_gradients(axes: Axes, one: Array, other: Array, dtype: Any) -> tuple[Array, Array]:
    """Sends every part the gradients of its keys, and returns the sums of those that arrive.

    Arrays have the shapes that ``unpack_gathered`` returns. Sums are computed in ``dtype``, in the order of parts. Of
    two parts, each gets the other's array.
    """
    assert axes.outer is not None
    if axes.swap:
        mine, its = Pair.of(one, other).hop(axes, 1).both
        return mine.astype(dtype), its.astype(dtype)
    # [batch, parts * places, ...] -> [parts, batch, places, ...]
    first, second = (x.reshape(x.shape[0], axes.parts, -1, *x.shape[2:]).swapaxes(0, 1) for x in (one, other))
    sent = [_stacked(first, second, 1)] if one.shape == other.shape else [first, second]
    sums = [lax.all_to_all(array, axes.outer, 0, 0).sum(0, dtype=dtype) for array in sent]
    return Pair(tuple(sums)).both


def _stacked(one: Array, other: Array, axis: int) -> Array:
    """``jnp.stack`` by two copies, because XLA's concatenation takes twice as long on a GPU.

    Uses ``jnp.stack`` inside a ``jax.shard_map`` over some axes of a mesh: the buffer would have to be split as the
    arrays are.
    """
    if partly_manual():
        return jnp.stack((one, other), axis)
    shape = (*one.shape[:axis], 2, *one.shape[axis:])
    stacked = varying_as((one, other), lax.empty(shape, one.dtype))
    for at, array in enumerate((one, other)):
        stacked = lax.dynamic_update_slice_in_dim(stacked, jnp.expand_dims(array, axis), at, axis)
    return stacked


class Pair(NamedTuple):
    """Two arrays that travel together: as one array ``[2, ...]`` if they have one shape, else as two."""

    arrays: tuple[Array, ...]

    @classmethod
    def of(cls, one: Array, other: Array) -> Pair:
        """Packs two arrays."""
        return cls((_stacked(one, other, 0),) if one.shape == other.shape else (one, other))

    @property
    def both(self) -> tuple[Array, Array]:
        """The two arrays."""
        one, other = self.arrays[0] if len(self.arrays) == 1 else self.arrays
        return one, other

    def hop(self, axes: Axes, distance: int) -> Pair:
        """Sends the pair ``distance`` parts on, in a ring; returns the pair that arrives from as far behind."""
        if axes.outer is None or distance % axes.parts == 0:
            return self
        ring = [(part, (part + distance) % axes.parts) for part in range(axes.parts)]
        return Pair(tuple(lax.ppermute(array, axes.outer, ring) for array in self.arrays))

    def plus(self, other: Pair) -> Pair:
        """The sums."""
        return Pair(tuple(mine + its for mine, its in zip(self.arrays, other.arrays, strict=True)))


def each_its_own(part: Any, kinds: Sequence[Any], run: Callable[..., Any], *operands: Any) -> Any:
    """Runs ``run(kind, *operands)`` with the kind of a device's part: a branch for each distinct kind.

    ``run`` must not contain a collective, because parts take different branches.
    """
    distinct = tuple(dict.fromkeys(kinds))
    if len(distinct) == 1:
        return run(distinct[0], *operands)
    branches = [lambda *arrays, kind=kind: run(kind, *arrays) for kind in distinct]
    select = jnp.asarray([distinct.index(kind) for kind in kinds], jnp.int32)
    return lax.switch(select[part], branches, *operands)


def varying_over(axes: Axes, *arrays: Any) -> tuple[Any, ...]:
    """The arrays (or None) typed as varying over the axes, and over every other axis that one of them varies over.

    A rank's result depends on which rank it is. JAX then sums the gradient of an array that is equal on every device
    over the devices, as it does for its own operations.
    """
    ranks = [lax.axis_index(name) for name in axes.names]  # typed as varying where types are checked
    kinds = [_varies_over(array) for array in (*ranks, *arrays) if array is not None]
    every: frozenset[str] = frozenset().union(*kinds)
    return tuple(array if array is None else _over(array, every) for array in arrays)


def _over(array: Array, every: frozenset[str]) -> Array:
    lacking = tuple(sorted(every - _varies_over(array)))
    return lax.pcast(array, lacking, to="varying") if lacking else array


def _varies_over(array: Any) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying  # type: ignore[attr-defined, no-any-return]
