"""Attention layers on rows that are spread over the devices of a mesh: their ``context_*`` fields."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.call.seq_info import SeqInfoLike
from attn_core.context_parallel.request import row_lengths
from jax_frontend.context_parallel import shards
from jax_frontend.context_parallel.attention import context_parallel_attention
from jax_frontend.context_parallel.mesh import axes_in_scope, find_row_mesh
from jax_frontend.context_parallel.prepare import document_offsets

Array = jax.Array


def is_context_parallel(layer: Any) -> bool:
    """Returns whether a layer's rows are spread over devices: whether it has a ``context_axis``.

    Linen initialises parameters by a call. If this call is outside the mesh, it runs plain attention on whole rows.
    """
    if layer.context_axis is None:
        return False
    initializing = getattr(layer, "is_initializing", None)
    return axes_in_scope(layer.context_axis) or initializing is None or not initializing()


def position_ids(layer: Any, seq_info: SeqInfoLike, places: int) -> Array:
    """Returns int32 ``[places]``: the position (in its row, or in its document) at each place of a spread row."""
    row_mesh, documents = find_row_mesh(None, layer.context_axis), document_offsets(seq_info)
    # Outside jax.shard_map an array has the shards of all devices, end to end.
    shard = places if row_mesh.inside else places // row_mesh.world
    length, _ = row_lengths(layer.context_length, documents, (shard, shard), row_mesh.world)
    layout = shards.cut_layout(row_mesh, layer.context_layout)
    return shards.position_ids(row_mesh, layout, length, documents)


def attend(layer: Any, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """Runs ``context_parallel_attention`` with a layer's axis, strategy, layout and length."""
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
