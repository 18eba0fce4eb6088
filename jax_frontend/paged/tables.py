"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as JAX or numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call import key_ranges as key_ranges_module
from attn_core.call.pages import PagedKV
from attn_core.call.tensors import PagedInputs
from attn_core.paged.quantised.scales import check_scale_values, check_used_scales
from attn_core.paged.tables import as_int32 as narrow
from attn_core.paged.tables import check_slots, check_starts, check_values, slots_of
from jax_frontend.dispatch import plan


def check_kinds(block_table: Any, seq_lens: Any, cu: Any, shapes_only: bool = False) -> None:
    """Raises TypeError or DTypeError unless the tables are JAX or numpy arrays; cu may be None."""
    for name, table in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu)):
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_array(name, table, shapes_only=shapes_only)


def copy_numpy(array: Any) -> Any:
    """Copies a numpy array; without the copy JAX may share its memory, and the caller may write to it too early."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def numpy_as_int32(*tables: Any) -> tuple[Any, ...]:
    """Returns block_table, seq_lens and cu_seqlens_q, those of numpy in int32.

    Raises:
        SpecError: for a value that int32 does not have.
    """
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    return tuple(narrow(n, t) if isinstance(t, np.ndarray) else t for n, t in zip(names, tables, strict=True))


def as_int32(table: Any) -> Any:
    """Returns an int64 table of JAX in int32, and any other argument as it is.

    Numbers that int32 does not have become its nearest one, which is no page and no length, as before.
    """
    if not isinstance(table, jax.Array) or table.dtype != jnp.int64:
        return table
    limit = jnp.iinfo(jnp.int32)
    return jnp.clip(table, limit.min, limit.max).astype(jnp.int32)


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


def check_starts_in_pages(kv_starts: Any, seq_lens: Any) -> None:
    """Checks the values of kv_starts, whose shape has been checked before, if they and the lengths are on the host."""
    if kv_starts is not None and is_on_host(kv_starts) and is_on_host(seq_lens):
        check_starts(np.asarray(kv_starts), np.asarray(seq_lens))


def check_scales_in_pages(paged: PagedKV | None, inputs: PagedInputs) -> None:
    """Checks the scales of quantised pages that a call reads, if they are on the host, where its tables are."""
    scales, starts = {"k_scales": inputs.k_scales, "v_scales": inputs.v_scales}, inputs.kv_starts
    if paged is None or paged.dtype is None or not all(map(is_on_host, scales.values())):
        return
    if starts is not None and not is_on_host(starts):
        return
    values = {name: np.asarray(array) for name, array in scales.items()}
    tables = np.asarray(inputs.block_table), np.asarray(inputs.seq_lens)
    check_scale_values(values, paged, *tables, None if starts is None else np.asarray(starts))


def check_page_scales(page_size: int, arrays: dict[str, Any]) -> None:
    """Checks the scales by page that an append reads, if they and its tables or slots, checked before, are on the host.

    arrays: by the names of the arguments.
    """
    scales = {name: arrays[name] for name in ("k_scales", "v_scales")}
    slots, where = arrays["slot_mapping"], [arrays[name] for name in ("block_table", "seq_lens", "cu_seqlens_q")]
    used = [*scales.values(), *(each for each in (slots, *where) if each is not None)]
    if scales["k_scales"] is None or scales["k_scales"].ndim != 2 or not all(map(is_on_host, used)):
        return
    if slots is None:
        table, lengths, cu = where
        offsets = np.arange(len(lengths) + 1) if cu is None else np.asarray(cu)
        slots = slots_of(np.asarray(table), np.asarray(lengths), offsets, page_size)
    slots = np.asarray(slots)
    check_used_scales({name: np.asarray(array) for name, array in scales.items()}, slots[slots >= 0], page_size)


def is_on_host(table: Any) -> bool:
    """Returns whether the values of an array can be read without waiting: numpy's, and untraced ones on the CPU."""
    concrete = not isinstance(table, jax.core.Tracer)
    return concrete and (isinstance(table, np.ndarray) or plan.device_name(table) == "cpu")
