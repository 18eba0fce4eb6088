"""Where an append writes its tokens and how far it rotates their keys, as tensors on the device of the keys."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from attn_core.paged import rotary, values
from torch_frontend.dispatch import plan
from torch_frontend.paged.rotary import index_of, rotate
from torch_frontend.paged.tables import op_tables, tables_of

Tensor = torch.Tensor


class Places(NamedTuple):
    """The arguments of an append beside its keys and values: tables or slots, and the rotation of the keys."""

    block_table: Tensor | None
    seq_lens: Tensor | None
    cu_seqlens_q: Tensor | None = None
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
        values.check_slot_values(slots, *k_pages.shape[:2])
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


def on_cpu(
    k_pages: Tensor, k: Tensor, v: Tensor, places: Places, scales: dict[str, Tensor | None]
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Checks the values of tables, slots, positions and scales on the CPU.

    Returns:
        The keys, rotated (in float32 beside quantised pages), and values that will be written, and their pages and
        offsets in them, ``[2, tokens]``.
    """
    named = {name: getattr(places, name) for name in (*values.TABLES, "slot_mapping", "positions")} | scales
    on_host = {name: None if tensor is None else tensor.numpy() for name, tensor in named.items()}
    cos, sin = places.cos, places.sin
    pool = k_pages.shape[0], k_pages.shape[1]
    written = values.places_of_append(k.shape[0], pool, on_host, None if cos is None else cos.shape[0])
    assert written is not None
    at = written.tokens if isinstance(written.tokens, slice) else torch.from_numpy(written.tokens)
    k, v = k[at], v[at]
    if cos is not None and sin is not None and written.positions is not None:
        # Quantised pages have bytes. Nothing rounds a rotated key before it is quantised.
        dtype = torch.float32 if k_pages.itemsize == 1 else k_pages.dtype
        positions = torch.from_numpy(written.positions)
        k = rotate(k, cos.detach(), sin.detach(), positions, places.interleaved, dtype)
    return k, v, written.places
