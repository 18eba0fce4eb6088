"""Calls on a mesh with Explicit axes: the axes are Auto inside them, and the results get explicit shardings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_frontend.dispatch.split import Split, axes_of, split_of
from jax_frontend.dispatch.vmap import MappedCall


def run_under_auto_axes(run: Callable[..., list[Any]], call: MappedCall, operands: Sequence[Any]) -> list[Any]:
    """Runs a call. Explicit mesh axes become Auto inside it, and its results get explicit shardings.

    Results are split as the call is; a gradient has the sharding of its operand.
    """
    mesh = explicit_mesh(operands)
    if mesh is None:
        return run(*operands)
    own, split = dict(zip(call.names, map(spec_of, operands), strict=True)), split_on(mesh, call, operands)
    rows = call.call.spec.lse_shape
    shapes = {"out": call.call.spec.out_shape, "lse": rows, "row_maximum": rows}
    specs = own | {name: split.spec(axes_of(call, name, shape)) for name, shape in shapes.items()}
    # Without its d, the name of a gradient is that of its operand.
    names = [name if name in shapes else name[1:] for name in call.call.results]
    return as_auto(run, mesh, [specs[name] for name in names])(*operands)  # type: ignore[no-any-return]


def split_on(mesh: Any, call: MappedCall, operands: Sequence[Any]) -> Split:
    """Returns how a mesh splits a call whose operands have types on it."""
    return split_of(call, mesh, [(name, a.shape, spec_of(a)) for name, a in zip(call.names, operands, strict=True)])


def run_like(run: Callable[..., Any], like: Any, *arrays: Any) -> Any:
    """Runs a function of arrays as if Explicit mesh axes were Auto; its results get the shardings of ``like``."""
    mesh = explicit_mesh(arrays)
    return run(*arrays) if mesh is None else as_auto(run, mesh, jax.tree.map(spec_of, like))(*arrays)


def split_as(array: Any, like: Any) -> Any:
    """Returns an array whose axes are split as the first of another's, if a mesh with Explicit axes splits one."""
    mesh = explicit_mesh((array, like))
    if mesh is None:
        return array
    return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*spec_of(like)[: array.ndim])))


def spec_of(array: Any) -> Any:
    """Returns the PartitionSpec in an array's type."""
    return jax.typeof(array).sharding.spec  # type: ignore[attr-defined]


def explicit_mesh(arrays: Any) -> Any:
    """Returns the mesh of the first array on a mesh with Explicit axes, or None."""
    meshes = (jax.typeof(array).sharding.mesh for array in jax.tree.leaves(arrays))  # type: ignore[attr-defined]
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def as_auto(run: Callable[..., Any], mesh: Any, specs: Any) -> Callable[..., Any]:
    """Returns a function in which the mesh's Explicit axes are Auto, and whose results have these PartitionSpecs."""
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    results = jax.tree.map(partial(NamedSharding, mesh), specs)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=results)  # type: ignore[no-any-return]
