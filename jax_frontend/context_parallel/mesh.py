"""Finds the mesh axes that a row is spread over, inside and outside ``jax.shard_map``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.errors import SpecError
from jax_frontend.context_parallel.exchange import Axes

Array = jax.Array


class Rows(NamedTuple):
    """How a call's arrays are split over a mesh.

    Attributes:
        row, batch, heads: the mesh axes that split each axis of the arrays, or None.
        batched: whether arrays have a batch axis.
        manual: the axes that ``jax.shard_map`` maps over.
    """

    row: tuple[str, ...]
    batch: Any
    heads: Any
    batched: bool
    manual: frozenset[str]

    @property
    def arrays(self) -> P:
        """The PartitionSpec of q, k, v and the output."""
        return P(*((self.batch,) if self.batched else ()), self.row, self.heads)

    def lse(self, packed: bool) -> P:
        """The PartitionSpec of the log-sum-exp."""
        return P(self.heads, self.row) if packed else P(self.batch, self.heads, self.row)


class Place(NamedTuple):
    """The mesh axes that a row is spread over.

    Attributes:
        names, sizes: one axis, or the outer and the inner one.
        mesh: the mesh for ``jax.shard_map`` to map over; None inside ``jax.shard_map``, where arrays are shards.
    """

    names: tuple[str, ...]
    sizes: tuple[int] | tuple[int, int]
    mesh: Any

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return math.prod(self.sizes)

    @property
    def inside(self) -> bool:
        """Whether this is inside ``jax.shard_map``."""
        return self.mesh is None

    @property
    def rank(self) -> Any:
        """This device's rank."""
        return Axes.of(self.names, self.sizes, "").rank

    def rows(self, requested: P | None, q: Any, *keys: Any) -> Rows:
        """How ``jax.shard_map`` is to split a call's arrays: along the row by the ranks, otherwise as they are split.

        JAX knows the current split of arrays on a mesh and of types on a mesh with Explicit axes; else the caller may
        pass it (``requested``). If it is unknown, other axes of the mesh stay automatic.
        """
        known = self._known(q) if requested is None else self._checked(requested, q.ndim)
        if known is None:
            alone = frozenset(name for name, size in self.mesh.shape.items() if size == 1)
            return Rows(self.names, None, None, q.ndim == 4, frozenset(self.names) | alone)
        batch, _, heads, _ = (None,) * (4 - q.ndim) + tuple(self._split_too(known, q.ndim, None))
        shared = math.prod(self.mesh.shape[name] for name in _entry(heads))
        if any(array.shape[-2] % shared for array in (q, *keys)):
            heads = None  # every device computes all heads
        return Rows(self.names, batch, heads, q.ndim == 4, frozenset(self.mesh.axis_names))

    def _checked(self, requested: Any, rank: int) -> P:
        named = {name for entry in requested for name in _entry(entry)} if isinstance(requested, P) else {None}
        if len(requested) > rank or not named <= set(self.mesh.axis_names):
            raise SpecError(
                f"partition_spec={requested!r}: expected a jax.sharding.PartitionSpec of q's {rank} axes over the mesh "
                f"axes {tuple(self.mesh.axis_names)}"
            )
        return requested

    def typed(self, array: Any, spec: P) -> Any:
        """The array as ``jax.shard_map`` takes it: on a mesh with Explicit axes, resharded to ``spec``."""
        if array is None:
            return None
        of_type = jax.typeof(array).sharding.mesh  # type: ignore[attr-defined]
        mesh = next((mesh for mesh in (of_type, self.mesh) if AxisType.Explicit in mesh.axis_types), None)
        return array if mesh is None else jax.sharding.reshard(array, NamedSharding(mesh, spec))

    def _known(self, array: Any) -> P | None:
        at = jax.typeof(array).sharding  # type: ignore[attr-defined]
        if AxisType.Explicit not in at.mesh.axis_types:
            at = None if isinstance(array, jax.core.Tracer) else array.sharding
        ours = isinstance(at, NamedSharding) and tuple(at.mesh.axis_names) == tuple(self.mesh.axis_names)
        return at.spec if ours else None

    def arranged(self, array: Array, axis: int | None, run: Callable[[Array], Array]) -> Array:
        """``run(array)``, split over the ranks along ``axis``, or not split over them if ``axis`` is None."""
        at = jax.typeof(array).sharding  # type: ignore[attr-defined]
        if AxisType.Explicit in at.mesh.axis_types:
            wanted = NamedSharding(at.mesh, self._split_too(at.spec, array.ndim, axis))
            return jax.sharding.auto_axes(run, out_sharding=wanted)(array)  # type: ignore[no-any-return]
        if axis is None:
            return run(array)
        auto = AxisType.Auto in self.mesh.axis_types  # an array without a mesh may go to one with Explicit axes
        others: list[Any] = [P.UNCONSTRAINED if auto else None] * array.ndim
        others[axis] = self.names
        split = NamedSharding(self.mesh, P(*others))
        if not auto:
            return jax.sharding.reshard(run(array), split)  # type: ignore[no-any-return]
        return jax.jit(lambda row: lax.with_sharding_constraint(run(row), split))(array)  # type: ignore[no-any-return]

    def _split_too(self, spec: P, rank: int, axis: int | None) -> P:
        """The PartitionSpec with the ranks' axes at ``axis`` and nowhere else."""
        entries = map(_entry, (*spec, *(None,) * (rank - len(spec))))
        kept = [tuple(name for name in entry if name not in self.names) for entry in entries]
        if axis is not None:
            kept[axis] = self.names
        return P(*(entry or None for entry in kept))


def find_place(mesh: Any, axis_name: str | tuple[str, str] | None) -> Place:
    """The axes of a call.

    Args:
        mesh: a ``jax.sharding.Mesh``, or None: the one of ``jax.shard_map`` or ``jax.set_mesh`` around the call.
        axis_name: the axis, or (outer, inner); optional for a mesh of one axis.

    Raises:
        SpecError: for axes that the mesh does not have.
    """
    context = jax.sharding.get_abstract_mesh()
    whole = context if mesh is None else mesh
    if not hasattr(whole, "axis_names"):
        raise SpecError(f"mesh={mesh!r}: expected a jax.sharding.Mesh, or None inside jax.shard_map")
    names = _names(axis_name, whole)
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    manual = {name for name, kind in kinds if kind is AxisType.Manual}
    if set(names) <= manual:
        return Place(names, _sizes(names, context), None)
    for name in names:
        if name not in whole.axis_names or name in manual:
            raise SpecError(
                f"axis_name={axis_name!r}: expected axes of the mesh that jax.shard_map maps over, or of mesh=, got "
                f"{name!r} and a mesh of {tuple(whole.axis_names)}"
            )
    return Place(names, _sizes(names, whole), whole)


def _sizes(names: tuple[str, ...], mesh: Any) -> tuple[int] | tuple[int, int]:
    outer, *inner = (mesh.shape[name] for name in names)
    return (outer, inner[0]) if inner else (outer,)


def around(axis_name: str | tuple[str, str]) -> bool:
    """Whether a mesh with these axes surrounds the call, by ``jax.shard_map`` or ``jax.set_mesh``."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return set(names) <= set(jax.sharding.get_abstract_mesh().axis_names)


def _entry(names: Any) -> tuple[str, ...]:
    """The mesh axes of a PartitionSpec's entry."""
    return () if names is None else names if isinstance(names, tuple) else (names,)


def _names(axis_name: Any, mesh: Any) -> tuple[str, ...]:
    if axis_name is None:
        if len(mesh.axis_names) != 1:
            raise SpecError(
                f"axis_name=None: expected the mesh axis that the row is spread over, or a pair (outer, inner), for a "
                f"mesh of {tuple(mesh.axis_names)}"
            )
        return tuple(mesh.axis_names)
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    right = isinstance(names, (tuple, list)) and len(names) in (1, 2) and len(set(names)) == len(names)
    if not right or not all(isinstance(name, str) for name in names):
        raise SpecError(f"axis_name={axis_name!r}: expected a mesh axis, or a pair of them (outer, inner)")
    return tuple(names)
