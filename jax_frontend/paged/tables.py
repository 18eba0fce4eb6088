"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as JAX or numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import key_ranges as key_ranges_module
from attn_core.call.pages import PagedKV
from attn_core.paged.tables import check_slots, check_values, slots_of
from jax_frontend.dispatch import plan


def check_kinds(block_table: Any, seq_lens: Any, cu: Any, shapes_only: bool = False) -> None:
    """Raises TypeError or DTypeError unless the tables are JAX or numpy arrays; cu may be None."""
    for name, table in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu)):
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_array(name, table, shapes_only=shapes_only)


def copy_numpy(array: Any) -> Any:
    """Copies a numpy array; without the copy JAX may share its memory, and the caller may write to it too early."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def check_table_values(
    max_len_q: int | None, tokens: int, pool: tuple[int, ...], *tables: Any, writes: bool = False
) -> bool:
    """Checks the values of tables, whose shapes have been checked before, if all are on the host; returns whether."""
    if not all(table is None or is_on_host(table) for table in tables):
        return False
    block_table, seq_lens, cu = (None if table is None else np.asarray(table) for table in tables)
    assert block_table is not None and seq_lens is not None
    paged = PagedKV(num_pages=pool[0], page_size=pool[1], width=block_table.shape[1])
    check_values(paged, tokens, max_len_q, block_table, seq_lens, cu, writes=writes)
    if writes:
        offsets = np.arange(len(seq_lens) + 1) if cu is None else cu
        check_slots(slots_of(block_table, seq_lens, offsets, pool[1]))
    return True


def check_ranges_in_pages(key_ranges: Any, tokens: Any) -> None:
    """Checks the values of key_ranges, whose shape has been checked before, if they are on the host."""
    if key_ranges is not None and is_on_host(key_ranges):
        key_ranges_module.check_values(np.asarray(key_ranges), tokens)


def is_on_host(table: Any) -> bool:
    """Returns whether the values of an array can be read without waiting: numpy's, and untraced ones on the CPU."""
    concrete = not isinstance(table, jax.core.Tracer)
    return concrete and (isinstance(table, np.ndarray) or plan.device_name(table) == "cpu")
