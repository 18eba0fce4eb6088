"""Where an append writes its tokens and how far it rotates their keys, as tensors on the device of the keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core.errors import DTypeError
from attn_core.paged import places as paged_places
from attn_core.paged import rotary, tables
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.paged.rotary import rotate
from torch_frontend.paged.tables import check_values, op_tables, tables_of

Tensor = torch.Tensor


class Places(NamedTuple):
    """The arguments of an append beside its keys and values: tables or slots, and the rotation of the keys."""

    block_table: Tensor | None
    seq_lens: Tensor | None
    cu_seqlens_q: Tensor | None
    slot_mapping: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None
    """None: the positions that the tables say."""
    interleaved: bool = False


def gather(k: Tensor, k_pages: Tensor, places: Places) -> Places:
    """Returns places whose arrays are tensors on one device. ``append`` checks the values of tables on the CPU."""
    if places.cos is not None:
        plan.check_tensor(rotary.COS, places.cos)
        plan.check_tensor(rotary.SIN, places.sin)
    positions = None if places.positions is None else index_of(k, "positions", places.positions)
    places = places._replace(positions=positions)
    if places.slot_mapping is None:
        named = tables_of(k, k_pages, None, places.block_table, places.seq_lens, places.cu_seqlens_q)
        return places._replace(block_table=named[0], seq_lens=named[1], cu_seqlens_q=named[2])
    slots = places.slot_mapping
    slots = np.asarray(slots, order="C") if isinstance(slots, np.ndarray) else slots
    if isinstance(slots, np.ndarray) and slots.ndim == 1 and k_pages.dim() == 4 and slots.dtype.kind == "i":
        paged_places.check_slot_values(slots, *k_pages.shape[:2])
    return places._replace(slot_mapping=index_of(k, "slot_mapping", slots))


def op_places(k: Tensor, places: Places) -> Places:
    """Returns places of an append that becomes one op, in the form that ops accept together with k."""
    slots, positions = places.slot_mapping, places.positions
    if positions is not None:
        places = places._replace(positions=index_of(k, "positions", positions))
    if slots is not None:
        return places._replace(slot_mapping=index_of(k, "slot_mapping", slots))
    named = op_tables(k, places.block_table, places.seq_lens, places.cu_seqlens_q)
    return places._replace(block_table=named[0], seq_lens=named[1], cu_seqlens_q=named[2])


def index_of(k: Tensor, name: str, array: Any) -> Tensor:
    """Returns whole numbers as a tensor; a numpy array is copied to the device of k."""
    if not isinstance(array, np.ndarray):
        plan.check_tensor(name, array)
        return array  # type: ignore[no-any-return]
    if array.dtype not in (np.int32, np.int64):
        raise DTypeError(f"{name}: expected dtype int32 or int64, got {array.dtype}; cast it")
    return tensor_kinds.to_device_of(k, np.asarray(array, order="C"))  # torch takes no negative strides


def on_cpu(k_pages: Tensor, k: Tensor, v: Tensor, places: Places) -> tuple[Tensor, Tensor, np.ndarray]:
    """Checks the values of tables, slots and positions on the CPU.

    Returns:
        The keys, rotated (in float32 beside quantised pages), and values that will be written, and their pages and
        offsets in them, ``[2, tokens]``.
    """
    if places.slot_mapping is not None:
        slots = places.slot_mapping.numpy()
        paged_places.check_slot_values(slots, *k_pages.shape[:2])
        written = np.flatnonzero(slots >= 0)
        at, slots = torch.from_numpy(written), slots[written]
        k, v = k[at], v[at]
        positions = None if places.positions is None else places.positions.numpy()[written]
        return _rotated(k, k_pages, places, positions), v, np.stack(np.divmod(slots.astype(np.int64), k_pages.shape[1]))
    assert places.block_table is not None and places.seq_lens is not None
    table, lengths = places.block_table.numpy(), places.seq_lens.numpy()
    cu = None if places.cu_seqlens_q is None else places.cu_seqlens_q.numpy()
    check_values(None, k.shape[0], k_pages, table, lengths, cu, writes=True)
    # An index assignment with a repeated slot would write either token, without an error; so slots are checked.
    if cu is None:  # each sequence has one new token, its last
        where = tables.last_slots(table, lengths, k_pages.shape[1])
    else:
        slots = tables.slots_of(table, lengths, cu, k_pages.shape[1])
        tables.check_slots(slots)
        where = np.stack(np.divmod(slots, k_pages.shape[1]))
        k, v = k[: len(slots)], v[: len(slots)]  # tokens behind the last offset belong to no sequence
    positions = None
    if places.positions is not None:
        positions = places.positions.numpy()[: len(k)]
    elif places.cos is not None:
        paged_places.check_lengths_have_angles(lengths, cu, places.cos.shape[0])
        positions = tables.positions_of(lengths, cu)
    return _rotated(k, k_pages, places, positions), v, where


def _rotated(k: Tensor, k_pages: Tensor, places: Places, positions: np.ndarray | None) -> Tensor:
    if places.cos is None or places.sin is None or positions is None:
        return k
    rotary.check_position_values(positions, places.cos.shape[0])
    cos, sin = places.cos.detach(), places.sin.detach()
    # Quantised pages have bytes. Nothing rounds a rotated key before it is quantised.
    dtype = torch.float32 if k_pages.itemsize == 1 else k_pages.dtype
    return rotate(k, cos, sin, torch.from_numpy(positions), places.interleaved, dtype)
