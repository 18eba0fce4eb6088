"""shard_sequence and unshard_sequence: reorder rows from positions to devices, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.context_parallel import places
from attn_core.context_parallel.layout import Layout, build_layout, check_axis
from attn_core.context_parallel.plan import parts_and_members
from attn_core.errors import ShapeError
from jax_frontend.context_parallel import mesh as context_mesh
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.context_parallel.prepare import document_offsets
from jax_frontend.dispatch import plan

Array = jax.Array


def shard_sequence(
    x: Array,
    mesh: Any = None,
    *,
    axis_name: str | tuple[str, str] | None = None,
    layout: str = "zigzag",
    dim: int = 1,
    seq_info: Any = None,
) -> Array:
    """Reorders a row by the devices that hold its positions: the shards of all devices end to end.

    Args:
        x: any array with the positions of a whole row at ``dim``: q, k, v, token ids, labels, positions.
        mesh, axis_name, layout, seq_info: as in ``context_parallel_attention``.

    Returns:
        Outside ``jax.shard_map`` all shards end to end, split over the axes. Inside, where x is the same on every
        device, this device's shard. Places without a position are 0.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    place, dim = context_mesh.find_place(mesh, axis_name), check_axis(dim, x.ndim)
    held = _spread(place, layout, x.shape[dim], document_offsets(seq_info))
    table = places.positions_by_shard(held)
    if place.inside:
        mine = jnp.asarray(table, jnp.int32)[place.rank]
        return jnp.take(x, mine, axis=dim, mode="fill", fill_value=0)
    return place.arranged(x, dim, lambda row: jnp.take(row, table.ravel(), axis=dim, mode="fill", fill_value=0))


def unshard_sequence(
    x: Array,
    mesh: Any = None,
    *,
    length: int | None = None,
    axis_name: str | tuple[str, str] | None = None,
    layout: str = "zigzag",
    dim: int = 1,
    seq_info: Any = None,
) -> Array:
    """The inverse of ``shard_sequence``: the row in the order of its positions.

    Args:
        length: positions of the row; if None, those of the documents, or all places.

    Returns:
        The whole row; inside ``jax.shard_map`` on every device.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    place, dim = context_mesh.find_place(mesh, axis_name), check_axis(dim, x.ndim)
    documents = document_offsets(seq_info)
    every = x.shape[dim] * (place.world if place.inside else 1)
    length = length if length is not None else every if documents is None else documents[-1]
    held = _spread(place, layout, length, documents)
    if held.shard * place.world != every:
        raise ShapeError(
            f"x: expected {place.world} shards of {held.shard} places, for length={length} in layout={layout!r}, got "
            f"{every} places in all"
        )
    index = places.places_by_position(held)
    if place.inside:
        for name in reversed(place.names):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
        return jnp.take(x, index, axis=dim)
    return place.arranged(x, None, lambda row: jnp.take(row, index, axis=dim))


def positions_held(place: Place, layout: str, length: int, documents: tuple[int, ...] | None) -> Array:
    """int32: the position (in its row, or in its document) at each place; 0 at places without one.

    Inside ``jax.shard_map`` ``[shard]``, this device's places; outside all places end to end.
    """
    positions = jnp.asarray(places.position_ids(_spread(place, layout, length, documents), documents))
    return positions[place.rank] if place.inside else positions.ravel()


def _spread(place: Place, layout: str, length: int, documents: tuple[int, ...] | None) -> Layout:
    return build_layout(layout, length, *parts_and_members(place.sizes, ""), documents)
