"""The attention of a layer whose rows are spread over the devices of a mesh."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.context_parallel.request import row_lengths
from jax_frontend.context_parallel import mesh
from jax_frontend.context_parallel.attention import context_parallel_attention
from jax_frontend.context_parallel.prepare import document_offsets
from jax_frontend.context_parallel.shards import positions_held

Array = jax.Array


def is_spread(layer: Any) -> bool:
    """Whether a layer's rows are spread over devices, which is so if it has a ``context_axis``.

    Linen initialises parameters by a call. Such a call outside of the mesh has whole rows and runs plain attention.
    """
    if layer.context_axis is None:
        return False
    initializing = getattr(layer, "is_initializing", None)
    return mesh.around(layer.context_axis) or initializing is None or not initializing()


def held_positions(layer: Any, seq_info: Any, places: int) -> Array:
    """int32 ``[places]``: the position (in its row, or in its document) at each place of a spread row."""
    place, documents = mesh.find_place(None, layer.context_axis), document_offsets(seq_info)
    shard = places if place.inside else places // place.world
    length, _ = row_lengths(layer.context_length, documents, (shard, shard), place.world)
    return positions_held(place, layer.context_layout, length, documents)


def attend_spread(layer: Any, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """``context_parallel_attention`` with a layer's axis, strategy, layout and length."""
    return context_parallel_attention(  # type: ignore[no-any-return]
        q,
        k,
        v,
        axis_name=layer.context_axis,
        strategy=layer.context_strategy,
        layout=layer.context_layout,
        length=layer.context_length,
        **options,
    )
