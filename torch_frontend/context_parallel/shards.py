"""Cuts a rank's shard out of a row, and joins shards to a row again."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_core.context_parallel import layout as layouts
from attn_core.context_parallel import places, request
from attn_core.context_parallel.layout import Layout
from attn_core.errors import ShapeError
from torch_frontend.context_parallel.exchange import axis, gather
from torch_frontend.dispatch import plan

Tensor = torch.Tensor


def layout_of(mesh: DeviceMesh, layout: str, length: int, documents: tuple[int, ...] | None) -> Layout:
    """The layout of a row over a mesh."""
    outer, inner = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (mesh.size(), 1)
    group_names(mesh)
    return layouts.build_layout(layout, length, outer, inner, documents)


def shard_sequence(
    x: Tensor, mesh: DeviceMesh, *, layout: str = "zigzag", dim: int = 1, seq_info: Any = None
) -> Tensor:
    """This rank's shard of a whole row that every rank has: q, k and v, or tokens, labels and positions.

    Args:
        x: any tensor with the row's positions at ``dim``.
        seq_info: the row's packed documents; a zigzag shard holds two pieces of each document.

    Returns:
        ``shard`` places at ``dim``; the last places are zeros if the row does not fill them. Differentiable.
    """
    plan.check_tensor("x", x)
    dim = layouts.check_axis(dim, x.dim())
    row = layout_of(mesh, layout, x.shape[dim], document_offsets(seq_info))
    index = torch.from_numpy(places.positions_by_shard(row)[rank_of(mesh)]).to(x.device)
    held = row.position_count(rank_of(mesh))
    positions = x.index_select(dim, index[:held])
    if held == row.shard:
        return positions
    shape = list(x.shape)
    shape[dim] = row.shard - held
    return torch.cat([positions, x.new_zeros(shape)], dim)


@torch.no_grad()
def unshard_sequence(
    x: Tensor, mesh: DeviceMesh, *, length: int, layout: str = "zigzag", dim: int = 1, seq_info: Any = None
) -> Tensor:
    """The whole row of ``length`` positions, on every rank, from every rank's shard ``x``. Without gradients."""
    plan.check_tensor("x", x)
    dim = layouts.check_axis(dim, x.dim())
    row = layout_of(mesh, layout, length, document_offsets(seq_info))
    if x.shape[dim] != row.shard:
        raise ShapeError(f"x: expected a shard of {row.shard} positions at dim {dim}, got {x.shape[dim]}")
    shards = x.movedim(dim, 0).contiguous()
    for name in reversed(group_names(mesh)):
        shards = gather(axis(name), [shards[None, :, None]])()[0][0, :, 0]
    return shards.index_select(0, torch.from_numpy(places.places_by_position(row)).to(x.device)).movedim(0, dim)


def rank_of(mesh: DeviceMesh) -> int:
    """This rank's number in a layout."""
    return (
        int(mesh.get_local_rank(0) * mesh.size(1) + mesh.get_local_rank(1)) if mesh.ndim == 2 else mesh.get_local_rank()
    )


def group_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """The names of the process groups of a mesh: one, or (outer, inner)."""
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


def document_offsets(seq_info: Any) -> request.Documents:
    """The offsets of a row's packed documents as plain numbers; see ``attn_core.context_parallel.request``."""
    return request.document_offsets(seq_info, _off_host)


def _off_host(offsets: Any) -> str | None:
    on_device = isinstance(offsets, Tensor) and offsets.device.type != "cpu"
    return f"a tensor on {offsets.device}" if on_device else None
