"""Where an append writes its tokens and how far it rotates their keys: the checks of values on the host, and slots."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from attn_core.paged import places, rotary
from attn_core.paged.tables import positions_of
from jax_frontend.paged.tables import check_table_values, is_on_host


def check_append_values(tokens: int, pool: tuple[int, ...], arrays: dict[str, Any]) -> None:
    """Checks the values of the tables, slots and positions of an append that are on the host.

    Args:
        pool: the shape of k_pages.
        arrays: by the names of the arguments; their shapes have been checked before.
    """
    slots, positions, cos = arrays["slot_mapping"], arrays["positions"], arrays[rotary.COS]
    written: Any = slice(None)
    if slots is not None:
        if not is_on_host(slots):
            return  # positions of tokens that are not written may be any
        places.check_slot_values(np.asarray(slots), *pool[:2])
        written = np.asarray(slots) >= 0
    else:
        table, lengths, cu = (arrays[name] for name in ("block_table", "seq_lens", "cu_seqlens_q"))
        if not check_table_values(None, tokens, pool, table, lengths, cu, writes=True):
            return
        cu = None if cu is None else np.asarray(cu)
        written = slice(tokens if cu is None else int(cu[-1]))
        if cos is not None and positions is None:
            places.check_lengths_have_angles(np.asarray(lengths), cu, cos.shape[0])
            positions = positions_of(np.asarray(lengths), cu)
    if positions is not None and is_on_host(positions):
        rotary.check_position_values(np.asarray(positions)[written], cos.shape[0])


def without_int64(slots: Any, page_size: int) -> Any:
    """Returns slots in numpy as int32 ``[2, tokens]``, each slot's page and the offset in it; others as they are.

    JAX may have no int64, and a pool may have more slots than int32 has numbers.
    """
    return jnp.array(places.pages_and_offsets(slots, page_size)) if isinstance(slots, np.ndarray) else slots
