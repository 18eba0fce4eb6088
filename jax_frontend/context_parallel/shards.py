"""Reorders rows from positions to devices, and back, and counts the positions of devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.call.seq_info import SeqInfoLike
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.call import check_cut_layout
from attn_core.context_parallel.layout import Layout, build_layout, check_axis
from attn_core.context_parallel.plan import outer_and_inner
from attn_core.errors import ShapeError, SpecError
from jax_frontend.context_parallel.mesh import RowMesh, find_row_mesh
from jax_frontend.context_parallel.prepare import document_offsets
from jax_frontend.dispatch import plan
from jax_frontend.dispatch.partitioning import Mesh

Array = jax.Array


def shard_sequence(
    x: Array,
    mesh: Mesh | None = None,
    *,
    axis_name: str | tuple[str, str] | None = None,
    layout: str = "zigzag",
    dim: int = 1,
    seq_info: SeqInfoLike = None,
) -> Array:
    """Reorders a row from positions to devices: the result is the shards of all devices, end to end.

    Args:
        x: any array with the positions of a whole row at ``dim``: q, k, v, token ids, labels or position ids.
        mesh, axis_name, layout, seq_info: as in ``context_parallel_attention``.

    Returns:
        Outside ``jax.shard_map``, all shards end to end, split over the axes. Inside, this device's shard; x must be
        the same on every device. Places without a position are 0.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    row_mesh, dim = find_row_mesh(mesh, axis_name), check_axis(dim, x.ndim)
    row = row_layout(row_mesh, layout, x.shape[dim], document_offsets(seq_info))
    table = index_arrays.positions_by_shard(row)
    if row_mesh.inside:
        own = jnp.asarray(table, jnp.int32)[row_mesh.rank]
        # Places without a position have the row's length as index, which mode="fill" reads as 0.
        return jnp.take(x, own, axis=dim, mode="fill", fill_value=0)
    flat = table.ravel()
    return row_mesh.run_sharded(x, dim, lambda array: jnp.take(array, flat, axis=dim, mode="fill", fill_value=0))


def unshard_sequence(
    x: Array,
    mesh: Mesh | None = None,
    *,
    length: int | None = None,
    axis_name: str | tuple[str, str] | None = None,
    layout: str = "zigzag",
    dim: int = 1,
    seq_info: SeqInfoLike = None,
) -> Array:
    """The inverse of ``shard_sequence``: the row in the order of its positions.

    Args:
        length: the number of positions of the row; None for the length of the documents, or for all places.

    Returns:
        The whole row; inside ``jax.shard_map``, on every device.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    row_mesh, dim = find_row_mesh(mesh, axis_name), check_axis(dim, x.ndim)
    documents = document_offsets(seq_info)
    places_in_all = x.shape[dim] * (row_mesh.world if row_mesh.inside else 1)
    length = length if length is not None else places_in_all if documents is None else documents[-1]
    row = row_layout(row_mesh, layout, length, documents)
    if row.shard * row_mesh.world != places_in_all:
        raise ShapeError(
            f"x: expected {row_mesh.world} shards of {row.shard} places, for length={length} in layout={layout!r}, got "
            f"{places_in_all} places in all"
        )
    index = index_arrays.places_by_position(row)
    if row_mesh.inside:
        # The inner axis first: ranks are numbered outer first, so the shards end up in the order of ranks.
        for name in reversed(row_mesh.names):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
        return jnp.take(x, index, axis=dim)
    return row_mesh.run_sharded(x, None, lambda array: jnp.take(array, index, axis=dim))


def shard_lengths(
    mesh: Mesh | None = None,
    *,
    length: int,
    axis_name: str | tuple[str, str] | None = None,
    layout: str = "zigzag",
    seq_info: SeqInfoLike = None,
) -> tuple[int, ...]:
    """Returns the number of positions of a row of ``length`` that each device holds, in the order of shards.

    They are at the first places of a shard. All shards have the places of the device with the most positions, so the
    last places of other shards are empty. Inside ``jax.shard_map``, ``jax.lax.axis_index(axis_name)`` is the number of
    this device's shard.

    Args:
        mesh, axis_name, layout, seq_info: as in ``context_parallel_attention``.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    return row_layout(find_row_mesh(mesh, axis_name), layout, length, document_offsets(seq_info)).position_counts


def cut_layout(row_mesh: RowMesh, layout: str | None) -> str:
    """Returns the layout in which the arrays of a call are cut: inside ``jax.shard_map`` "zigzag" for None.

    Raises:
        SpecError: for None outside, where arrays are whole rows, which may be in their natural order.
    """
    if layout is None and not row_mesh.inside:
        raise SpecError(
            "layout=None: outside jax.shard_map expected the layout of the whole rows: the one that shard_sequence "
            "cut ('zigzag' by default), or 'contiguous' for rows in their natural order; "
            "explain_context_parallel(..., layout=None) chooses one"
        )
    layout = "zigzag" if layout is None else layout
    check_cut_layout(layout)
    return layout


def position_ids(row_mesh: RowMesh, layout: str, length: int, documents: tuple[int, ...] | None) -> Array:
    """Returns int32: the position (in its row, or in its document) at each place; 0 at places without a position.

    Inside ``jax.shard_map`` ``[shard]``, this device's places; outside all places end to end.
    """
    positions = jnp.asarray(index_arrays.position_ids(row_layout(row_mesh, layout, length, documents), documents))
    return positions[row_mesh.rank] if row_mesh.inside else positions.ravel()


def row_layout(row_mesh: RowMesh, layout: str, length: int, documents: tuple[int, ...] | None) -> Layout:
    """Returns the layout of a row over a mesh."""
    return build_layout(layout, length, *outer_and_inner(row_mesh.sizes, "", 1), documents)
