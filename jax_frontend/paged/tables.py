"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as JAX or numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import key_ranges as key_ranges_module
from attn_core.call.pages import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.paged.scales import check_scale_values, check_used_scales
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
    if not all(table is None or _on_host(table) for table in tables):
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
    if key_ranges is not None and _on_host(key_ranges):
        key_ranges_module.check_values(np.asarray(key_ranges), tokens)


def check_scales_in_pages(paged: PagedKV | None, inputs: PagedInputs) -> None:
    """Checks the scales of quantised pages that a call reads, if they are on the host, where its tables are."""
    scales = {"k_scales": inputs.k_scales, "v_scales": inputs.v_scales}
    if paged is None or paged.dtype is None or not all(map(_on_host, scales.values())):
        return
    values = {name: np.asarray(array) for name, array in scales.items()}
    check_scale_values(values, paged, np.asarray(inputs.block_table), np.asarray(inputs.seq_lens))


def check_page_scales(scales: dict[str, Any], page_size: int, block_table: Any, seq_lens: Any, cu: Any) -> None:
    """Checks the scales by page that an append reads, if they and the tables, which have been checked, are on the
    host."""
    arrays = (*scales.values(), block_table, seq_lens, *(() if cu is None else (cu,)))
    if scales["k_scales"] is None or scales["k_scales"].ndim != 2 or not all(map(_on_host, arrays)):
        return
    offsets = np.arange(len(seq_lens) + 1) if cu is None else np.asarray(cu)
    slots = slots_of(np.asarray(block_table), np.asarray(seq_lens), offsets, page_size)
    check_used_scales({name: np.asarray(array) for name, array in scales.items()}, slots, page_size)


def _on_host(table: Any) -> bool:
    concrete = not isinstance(table, jax.core.Tracer)
    return concrete and (isinstance(table, np.ndarray) or plan.device_name(table) == "cpu")
