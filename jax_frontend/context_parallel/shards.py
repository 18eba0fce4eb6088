"""shard_sequence and unshard_sequence: rows in the order of positions, and in that of the devices that hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from attn_core.context_parallel import places
from attn_core.context_parallel.cost.choose import parts_and_members
from attn_core.context_parallel.layout import Layout, axis_of
from attn_core.context_parallel.layout import layout as spread
from attn_core.errors import ShapeError
from jax_frontend.context_parallel import mesh as context_mesh
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.context_parallel.prepare import documents_of
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
    """A row in the order of the devices that hold its positions, each device's shard after the other.

    Args:
        x: any array whose axis ``dim`` has the positions of a whole row: q, k, v, token ids, labels, positions.
        mesh, axis_name, layout, seq_info: as in ``context_parallel_attention``.

    Returns:
        Outside ``jax.shard_map`` all shards end to end, split over the axes; inside, where x is the same on every
        device, this device's shard. Places that hold no position are 0.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    place, dim = context_mesh.found(mesh, axis_name), axis_of(dim, x.ndim)
    made = _spread(place, layout, x.shape[dim], documents_of(seq_info))
    table = places.of_shards(made)
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
    """The way back: the row in the order of its positions, of shards in the order of devices.

    Args:
        length: how many positions the row has; all places, or those of the documents, where it is None.

    Returns:
        The whole row; inside ``jax.shard_map`` on every device.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    plan.check_array("x", x)
    place, dim = context_mesh.found(mesh, axis_name), axis_of(dim, x.ndim)
    documents = documents_of(seq_info)
    every = x.shape[dim] * (place.world if place.inside else 1)
    length = length if length is not None else every if documents is None else documents[-1]
    made = _spread(place, layout, length, documents)
    if made.shard * place.world != every:
        raise ShapeError(
            f"x: expected {place.world} shards of {made.shard} places, for length={length} in layout={layout!r}, got "
            f"{every} places in all"
        )
    index = places.in_order(made)
    if place.inside:
        for name in reversed(place.names):
            x = lax.all_gather(x, name, axis=dim, tiled=True)
        return jnp.take(x, index, axis=dim)
    return place.arranged(x, None, lambda row: jnp.take(row, index, axis=dim))


def positions_held(place: Place, layout: str, length: int, documents: tuple[int, ...] | None) -> Array:
    """int32: the position in its row, or in its document, that each place holds; 0 for places that hold none.

    Inside ``jax.shard_map`` of this device's places, ``[shard]``, and outside of all of them end to end.
    """
    found = jnp.asarray(places.held_positions(_spread(place, layout, length, documents), documents))
    return found[place.rank] if place.inside else found.ravel()


def _spread(place: Place, layout: str, length: int, documents: tuple[int, ...] | None) -> Layout:
    return spread(layout, length, *parts_and_members(place.sizes, ""), documents)
