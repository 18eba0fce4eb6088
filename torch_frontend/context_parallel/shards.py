"""Cuts a rank's shard out of a row, joins shards to a row again, and counts the positions of shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from attn_core.call.seq_info import SeqInfoLike
from attn_core.context_parallel import index_arrays, request
from attn_core.context_parallel import layout as layouts
from attn_core.errors import ShapeError
from torch_frontend.context_parallel.agreement import Exchange, announce_error, find_meeting
from torch_frontend.context_parallel.exchange import gather
from torch_frontend.context_parallel.mesh import find_axis, group_names, rank_of, row_layout
from torch_frontend.dispatch import plan, tensor_kinds

Tensor = torch.Tensor


def shard_sequence(
    x: Tensor, mesh: DeviceMesh, *, layout: str = "zigzag", dim: int = 1, seq_info: SeqInfoLike = None
) -> Tensor:
    """Returns this rank's shard of a whole row that every rank has: of q, k and v, or of tokens, labels and positions.

    Args:
        x: any tensor with the row's positions at ``dim``.
        seq_info: the row's packed documents; a zigzag shard holds two pieces of each document.

    Returns:
        The shard. If the row does not fill all shards, the last places of some shards are zeros. Differentiable.
    """
    plan.check_tensor("x", x)
    if x.numel() * x.element_size() >= 2**63:
        raise ShapeError(f"x: expected a tensor of less than 2^63 bytes, got shape {list(x.shape)}")
    dim = layouts.check_axis(dim, x.dim())
    row = row_layout(mesh, layout, x.shape[dim], document_offsets(seq_info))
    index = torch.from_numpy(index_arrays.positions_by_shard(row)[rank_of(mesh)]).to(x.device)
    tensor_kinds.check_data(index, x=x)
    count = row.position_count(rank_of(mesh))
    positions = x.index_select(dim, index[:count])
    if count == row.shard:
        return positions
    shape = list(x.shape)
    shape[dim] = row.shard - count
    return torch.cat([positions, x.new_zeros(shape)], dim)


@torch.no_grad()
def unshard_sequence(
    x: Tensor, mesh: DeviceMesh, *, length: int, layout: str = "zigzag", dim: int = 1, seq_info: SeqInfoLike = None
) -> Tensor:
    """Returns the whole row of ``length`` positions on every rank, from every rank's shard ``x``. Has no gradient.

    Ranks compare every call first, through the store of torch.distributed.

    Raises:
        ShapeError, SpecError, TypeError: for invalid arguments, and on every rank if ranks make different calls.
    """
    try:
        plan.check_tensor("x", x)
        dim = layouts.check_axis(dim, x.dim())
        documents = document_offsets(seq_info)
        row = row_layout(mesh, layout, length, documents)
        if x.shape[dim] != row.shard:
            raise ShapeError(f"x: expected a shard of {row.shard} positions at dim {dim}, got {x.shape[dim]}")
        order = torch.from_numpy(index_arrays.places_by_position(row)).to(x.device)
        tensor_kinds.check_data(order, x=x)
    except Exception as error:
        announce_error(error, mesh)
        raise
    where = f"length {length}, layout {layout}" + ("" if documents is None else f", documents {documents}")
    what = f"x {list(x.shape)} {x.dtype} on {x.device.type}, dim {dim}"
    meeting = find_meeting(*map(find_axis, group_names(mesh)))
    if meeting is not None:
        meeting.begin(Exchange.of("unshard_sequence", f"{what}, {where}"))
    shards = x.movedim(dim, 0).contiguous()
    # The inner axis first: ranks are numbered outer first, so the gathered shards end up in the order of ranks.
    for name in reversed(group_names(mesh)):
        shards = gather(find_axis(name), [shards[None, :, None]]).wait()[0][0, :, 0]  # as [batch, places, heads, ...]
    if meeting is not None:
        meeting.end()
    return shards.index_select(0, order).movedim(0, dim)


def shard_lengths(
    mesh: DeviceMesh, *, length: int, layout: str = "zigzag", seq_info: SeqInfoLike = None
) -> tuple[int, ...]:
    """Returns the number of positions of a row of ``length`` that each rank holds, in the order of ranks.

    They are at the first places of a shard. All shards have the places of the rank with the most positions, so the last
    places of other shards are empty. On a mesh of two axes, ranks are numbered along the inner axis first.

    Args:
        layout, seq_info: as in ``shard_sequence``.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    return row_layout(mesh, layout, length, document_offsets(seq_info)).position_counts


def document_offsets(seq_info: SeqInfoLike) -> request.Documents:
    """Returns the offsets of a row's packed documents as plain numbers; see ``attn_core.context_parallel.request``."""
    return request.document_offsets(seq_info, _off_host)


def _off_host(offsets: Any) -> str | None:
    on_device = isinstance(offsets, Tensor) and offsets.device.type != "cpu"
    return f"a tensor on {offsets.device}" if on_device else None
