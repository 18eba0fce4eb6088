"""DTensors in context parallelism: takes their local parts, and shards the output as q is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from attn_core.errors import SpecError


def local(tensors: Sequence[Any], mesh: DeviceMesh) -> tuple[Any, ...]:
    """The tensors, each DTensor as its local part.

    Raises:
        SpecError: for a DTensor that is not sharded on its positions over all axes of ``mesh``, or whose positions are
            split over other axes.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return tuple(tensors)
    return tuple(_local(name, tensor, mesh) for name, tensor in zip("qkv", tensors, strict=True))


def _local(name: str, tensor: Any, mesh: DeviceMesh) -> Any:
    if not isinstance(tensor, DTensor):
        raise SpecError(f"{name}: expected a DTensor, as the others of q, k and v are")
    axes, of_row = _axes(name, tensor, mesh)
    positions = tensor.dim() - 3
    for axis, placement in zip(axes, tensor.placements, strict=True):
        on_row = isinstance(placement, Shard) and placement.dim == positions
        if on_row != (axis in of_row):
            expected = f"Shard({positions}), the positions" if axis in of_row else "positions that are not split"
            raise SpecError(f"{name}: expected {expected}, over mesh axis {axis!r}, got {placement}")
        if not isinstance(placement, (Shard, Replicate)):
            raise SpecError(f"{name}: expected whole numbers over mesh axis {axis!r}, got {placement}")
    return tensor.to_local()


def _axes(name: str, tensor: DTensor, mesh: DeviceMesh) -> tuple[Sequence[Any], Sequence[Any]]:
    """(axes of a DTensor's mesh, axes that share a row): by number if the meshes are equal, else by name."""
    if tensor.device_mesh == mesh:
        return range(mesh.ndim), range(mesh.ndim)
    axes, of_row = tensor.device_mesh.mesh_dim_names or (), mesh.mesh_dim_names or ()
    if not of_row or not set(of_row) <= set(axes):
        raise SpecError(f"{name}: expected a DTensor over the axes {of_row} of mesh, got one over {axes}")
    return axes, of_row


def wrapped(out: torch.Tensor, like: Any, mesh: DeviceMesh) -> Any:
    """The output as a DTensor with the placements of q, if q is a DTensor."""
    if not isinstance(like, DTensor):
        return out
    shape = (*like.shape[:-1], out.shape[-1])
    return DTensor.from_local(out, like.device_mesh, like.placements, shape=torch.Size(shape), stride=_strides(shape))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides))
