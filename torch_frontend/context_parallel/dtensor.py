"""DTensors in context parallelism: takes their local parts, and gives the output the placements of q."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attn_core.errors import SpecError


def to_local(tensors: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """Returns the local parts of q, k and v if they are DTensors; plain tensors are returned as they are.

    Raises:
        SpecError: for a DTensor that is not sharded on its positions over all axes of ``mesh``, or whose positions are
            split over other axes.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return tuple(tensors)
    return tuple(_checked_local(name, tensor, mesh) for name, tensor in zip("qkv", tensors, strict=True))


def _checked_local(name: str, tensor: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(tensor, DTensor):
        raise SpecError(f"{name}: expected a DTensor, as the others of q, k and v are")
    axes, row_axes = _axes(name, tensor, mesh)
    positions = tensor.dim() - 3
    for axis, placement in zip(axes, tensor.placements, strict=True):
        on_row = isinstance(placement, Shard) and placement.dim == positions
        if on_row != (axis in row_axes):
            expected = f"Shard({positions}), the positions" if axis in row_axes else "positions that are not split"
            raise SpecError(f"{name}: expected {expected}, over mesh axis {axis!r}, got {placement}")
        if not isinstance(placement, (Shard, Replicate)):
            raise SpecError(f"{name}: expected whole numbers over mesh axis {axis!r}, got {placement}")
    return tensor.to_local()


def _axes(name: str, tensor: DTensor, mesh: DeviceMesh) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns (axes of a DTensor's mesh, axes that share a row): by number if the meshes are equal, else by name."""
    if tensor.device_mesh == mesh:
        return range(mesh.ndim), range(mesh.ndim)
    axes, row_axes = tensor.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not row_axes or not set(row_axes) <= set(axes):
        raise SpecError(f"{name}: expected a DTensor over the axes {row_axes} of mesh, got one over {axes}")
    return axes, row_axes


def to_dtensor(out: torch.Tensor, q: Any, mesh: DeviceMesh) -> Any:
    """Returns the output as a DTensor with the placements of q, if q is a DTensor."""
    if not isinstance(q, DTensor):
        return out
    # Stated, because from_local would otherwise assume that every axis is split evenly.
    shape = (*q.shape[:-1], out.shape[-1])
    return DTensor.from_local(out, q.device_mesh, q.placements, shape=torch.Size(shape), stride=_strides(shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
