"""The axes of ranks that share a row: the process groups of a DeviceMesh, and this process's rank in them."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from attn_core.context_parallel.layout import Layout, build_layout
from attn_core.errors import ShapeError


class RankAxis(NamedTuple):
    """One axis of ranks: the name of its process group, its size, and this process's rank in it."""

    name: str
    size: int
    rank: int


SINGLE_RANK = RankAxis("", 1, 0)
"""The axis of a process that shares nothing."""


def find_axis(name: str) -> RankAxis:
    """Returns the axis of a process group by its name; SINGLE_RANK for the empty name."""
    if not name:
        return SINGLE_RANK
    group = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type, unused-ignore]
    return RankAxis(name, group.size(), group.rank())


def group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Returns the names of the process groups of a mesh: one, or (outer, inner)."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh: expected a torch DeviceMesh, got {type(mesh).__module__}.{type(mesh).__qualname__}; "
            "torch.distributed.device_mesh.init_device_mesh makes one"
        )
    if mesh.ndim not in (1, 2):
        raise ShapeError(
            f"mesh: expected one axis of ranks or two (outer, inner), got {mesh.ndim}; take the axes that share a "
            'sequence, such as mesh["cp"] or mesh["ring", "ulysses"]'
        )
    return tuple([mesh.get_group(at).group_name for at in range(mesh.ndim)])


def rank_of(mesh: DeviceMesh) -> int:
    """Returns this process's rank in a layout over the mesh."""
    if mesh.ndim == 2:
        return int(mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1))
    return mesh.get_local_rank()


def row_layout(mesh: DeviceMesh, layout: str, length: int, documents: tuple[int, ...] | None) -> Layout:
    """Returns the layout of a row over a mesh."""
    group_names(mesh)  # checks the mesh
    outer, inner = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (mesh.size(), 1)
    return build_layout(layout, length, outer, inner, documents)
