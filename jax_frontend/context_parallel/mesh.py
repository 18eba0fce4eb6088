"""The mesh axes that a row is spread over, inside and outside ``jax.shard_map``, and this device's rank in them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from attn_core.context_parallel.plan import AxisSizes, outer_and_inner
from attn_core.errors import SpecError, shown
from jax_frontend.dispatch.partitioning import Mesh

Array = jax.Array


class RankAxes(NamedTuple):
    """The mesh axes of the ranks, as a strategy uses them. Rank ``part * members + member`` is a member of a part.

    Attributes:
        outer: the axis of the parts; None if there is one part.
        inner: the axis of a part's members, which share its heads; None if a part has one member.
        parts, members: their sizes.
    """

    outer: str | None
    inner: str | None
    parts: int
    members: int

    @classmethod
    def of(cls, names: tuple[str, ...], sizes: AxisSizes, strategy: str) -> RankAxes:
        """Returns the axes for a strategy: on one axis, "ulysses" has it as the inner one, others as the outer one."""
        return cls(*outer_and_inner(names, strategy, None), *outer_and_inner(sizes, strategy, 1))

    @property
    def names(self) -> tuple[str, ...]:
        """The axes, in the order of ranks."""
        return tuple(name for name in (self.outer, self.inner) if name is not None)

    @property
    def swap(self) -> bool:
        """Whether there are two parts, which swap blocks instead of gathering them; see ``places_in_gathered``."""
        return self.parts == 2

    @property
    def part(self) -> Array | int:
        """This device's part."""
        return 0 if self.outer is None else lax.axis_index(self.outer)

    @property
    def member(self) -> Array | int:
        """This device's number among the members of its part."""
        return 0 if self.inner is None else lax.axis_index(self.inner)

    @property
    def rank(self) -> Array | int:
        """This device's rank."""
        return self.part * self.members + self.member


class ArraySpecs(NamedTuple):
    """How a call's arrays are split over a mesh.

    Attributes:
        row, batch, heads: the mesh axes that split these axes of the arrays, or None.
        batched: whether the arrays have a batch axis.
        manual: the mesh axes that ``jax.shard_map`` maps over.
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


class RowMesh(NamedTuple):
    """The mesh axes that a row is spread over.

    Attributes:
        names, sizes: of one axis, or of the outer and the inner one.
        mesh: the mesh for ``jax.shard_map`` to map over; None inside ``jax.shard_map``, where arrays are shards.
    """

    names: tuple[str, ...]
    sizes: AxisSizes
    mesh: Any

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def inside(self) -> bool:
        """Whether the call is inside ``jax.shard_map``."""
        return self.mesh is None

    @property
    def rank(self) -> Array | int:
        """This device's rank."""
        return RankAxes.of(self.names, self.sizes, "").rank

    def array_specs(self, requested: P | None, q: Array, *keys: Array) -> ArraySpecs:
        """Returns how ``jax.shard_map`` splits a call's arrays: the row over the ranks, other axes as they are now.

        JAX knows the current split of concrete arrays, and of traced arrays on a mesh with Explicit axes; otherwise the
        caller may pass it (``requested``). If it is unknown, the other axes of the mesh stay automatic.
        """
        spec = self._current_spec(q) if requested is None else self._check_spec(requested, q.ndim)
        if spec is None:
            # Axes of size 1 split nothing. If no other axis remains, the map is over the whole mesh, where kernels take
            # any array.
            trivial = frozenset(name for name, size in self.mesh.shape.items() if size == 1)
            return ArraySpecs(self.names, None, None, q.ndim == 4, frozenset(self.names) | trivial)
        batch, _, heads, _ = (None,) * (4 - q.ndim) + tuple(self._with_row_at(None, spec, q.ndim))
        shared = math.prod(self.mesh.shape[name] for name in _entry(heads))
        if any(array.shape[-2] % shared for array in (q, *keys)):
            heads = None  # the axis cannot split all arrays, so every device computes all heads
        return ArraySpecs(self.names, batch, heads, q.ndim == 4, frozenset(self.mesh.axis_names))

    def _check_spec(self, requested: object, rank: int) -> P:
        named = {name for entry in requested for name in _entry(entry)} if isinstance(requested, P) else {None}
        if not isinstance(requested, P) or len(requested) > rank or not named <= set(self.mesh.axis_names):
            raise SpecError(
                f"partition_spec={shown(requested)}: expected a jax.sharding.PartitionSpec of q's {rank} axes over the "
                f"mesh axes {tuple(self.mesh.axis_names)}"
            )
        return requested

    def reshard(self, array: Array | None, spec: P) -> Array | None:
        """Returns the array as ``jax.shard_map`` takes it: on a mesh with Explicit axes, resharded to ``spec``."""
        if array is None:
            return None
        current = jax.typeof(array).sharding.mesh  # type: ignore[attr-defined]
        mesh = next((mesh for mesh in (current, self.mesh) if AxisType.Explicit in mesh.axis_types), None)
        return array if mesh is None else jax.sharding.reshard(array, NamedSharding(mesh, spec))

    def _current_spec(self, array: Array) -> P | None:
        """Returns how an array is split over this mesh; None if JAX does not know."""
        sharding = jax.typeof(array).sharding  # type: ignore[attr-defined]
        if AxisType.Explicit not in sharding.mesh.axis_types:
            sharding = None if isinstance(array, jax.core.Tracer) else array.sharding
        if not isinstance(sharding, NamedSharding):
            return None
        # The spec of another mesh names axes that this mesh may not have.
        return sharding.spec if tuple(sharding.mesh.axis_names) == tuple(self.mesh.axis_names) else None

    def run_sharded(self, array: Array, axis: int | None, run: Callable[[Array], Array]) -> Array:
        """Returns ``run(array)``, split over the ranks along ``axis``, or not split over them if ``axis`` is None."""
        sharding = jax.typeof(array).sharding  # type: ignore[attr-defined]
        if AxisType.Explicit in sharding.mesh.axis_types:
            target = NamedSharding(sharding.mesh, self._with_row_at(axis, sharding.spec, array.ndim))
            return jax.sharding.auto_axes(run, out_sharding=target)(array)  # type: ignore[no-any-return]
        if axis is None:
            return run(array)
        auto = AxisType.Auto in self.mesh.axis_types  # an array without a mesh may go to one with Explicit axes
        others: list[Any] = [P.UNCONSTRAINED if auto else None] * array.ndim
        others[axis] = self.names
        split = NamedSharding(self.mesh, P(*others))
        if not auto:
            return jax.sharding.reshard(run(array), split)  # type: ignore[no-any-return]
        return jax.jit(lambda row: lax.with_sharding_constraint(run(row), split))(array)  # type: ignore[no-any-return]

    def _with_row_at(self, axis: int | None, spec: P, rank: int) -> P:
        """Returns the PartitionSpec with the ranks' axes at ``axis`` and nowhere else."""
        entries = map(_entry, (*spec, *(None,) * (rank - len(spec))))
        others = [tuple(name for name in entry if name not in self.names) for entry in entries]
        if axis is not None:
            others[axis] = self.names
        return P(*(entry or None for entry in others))


def find_row_mesh(mesh: Mesh | None, axis_name: str | tuple[str, str] | None) -> RowMesh:
    """Returns the mesh axes of a call.

    Args:
        mesh: a ``jax.sharding.Mesh``, or None for the mesh of ``jax.shard_map`` or ``jax.set_mesh`` around the call.
        axis_name: the axis, or (outer, inner); optional for a mesh of one axis.

    Raises:
        SpecError: for axes that the mesh does not have.
    """
    context = jax.sharding.get_abstract_mesh()
    whole = context if mesh is None else mesh
    if not hasattr(whole, "axis_names"):
        raise SpecError(f"mesh={shown(mesh)}: expected a jax.sharding.Mesh, or None inside jax.shard_map")
    names = _names(axis_name, whole)
    kinds = zip(context.axis_names, context.axis_types, strict=True)
    manual = {name for name, kind in kinds if kind is AxisType.Manual}
    # Manual axes mean that jax.shard_map already maps over them, so arrays are shards.
    if set(names) <= manual:
        return RowMesh(names, _sizes(names, context), None)
    for name in names:
        if name not in whole.axis_names or name in manual:
            raise SpecError(
                f"axis_name={shown(axis_name)}: expected axes of the mesh that jax.shard_map maps over, or of mesh=, "
                f"got {name!r} and a mesh of {tuple(whole.axis_names)}"
            )
    return RowMesh(names, _sizes(names, whole), whole)


def _sizes(names: tuple[str, ...], mesh: Mesh) -> AxisSizes:
    outer, *inner = (mesh.shape[name] for name in names)
    return (outer, inner[0]) if inner else (outer,)


def axes_in_scope(axis_name: str | tuple[str, str]) -> bool:
    """Returns whether the call is inside ``jax.shard_map`` or ``jax.set_mesh`` with a mesh that has these axes."""
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    return set(names) <= set(jax.sharding.get_abstract_mesh().axis_names)


def _entry(names: Any) -> tuple[str, ...]:
    """Returns the mesh axes of a PartitionSpec's entry."""
    return () if names is None else names if isinstance(names, tuple) else (names,)


def _names(axis_name: str | tuple[str, str] | None, mesh: Mesh) -> tuple[str, ...]:
    """Returns the one or two mesh axes that a row is spread over."""
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
        raise SpecError(f"axis_name={shown(axis_name)}: expected a mesh axis, or a pair of them (outer, inner)")
    return tuple(names)
