"""Appends new keys and values to their pages: by indexing on a CPU, with our own kernel on a GPU."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_core.errors import ShapeError
from attn_core.paged import arguments
from attn_core.paged.tables import check_slots, last_slots, slots_of
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.plan import check_no_gradient, check_values, tables_of


def append(k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any) -> None:
    """Checks the arguments of ``append_kv`` and writes k and v into the pages, in place."""
    for name, tensor in (("k_pages", k_pages), ("k", k)):
        plan.check_tensor(name, tensor)
    block_table, seq_lens, cu = tables_of(k, k_pages, None, block_table, seq_lens, cu_seqlens_q)
    check_appended(k_pages, v_pages, k, v, block_table, seq_lens, cu)
    if k.shape[0] == 0:
        return
    with torch.no_grad():
        if k.device.type == "cpu":
            _append_on_cpu(k_pages, v_pages, k, v, block_table, seq_lens, cu)
        else:
            on_device(append_on_gpu, k.device)(k_pages, v_pages, k, v, block_table, seq_lens, cu)


def check_appended(k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any) -> None:
    """Checks the arguments of an append except the values of its tables."""
    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages), ("k", k), ("v", v)):
        plan.check_tensor(name, tensor)
        check_no_gradient(name, tensor)
    tensors = (k_pages, v_pages, k, v, block_table, seq_lens, cu)
    entries = tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
    # Symbolic sizes cannot be compared. The op checks them when it runs.
    if all([type(size) is int for entry in entries if entry for size in entry[0]]):
        _check_metadata(entries)


@lru_cache(maxsize=1024)
def _check_metadata(entries: tuple[plan.Metadata | None, ...]) -> None:
    """Checks the metadata of an append's tensors; a call whose metadata passed before is not checked again."""
    names = ("k_pages", "v_pages", "k", "v", "block_table", "seq_lens", "cu_seqlens_q")
    arguments.check_append(
        {name: None if entry is None else plan.facts(*entry) for name, entry in zip(names, entries, strict=True)}
    )


def _append_on_cpu(k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any) -> None:
    """Checks the values of the tables and writes k and v into the pages by indexing."""
    table, lengths = block_table.numpy(), seq_lens.numpy()
    k, v = k.detach(), v.detach()
    # An index assignment with a repeated slot would write either token, without an error; so slots are checked.
    if cu is None:  # each sequence has one new token, its last
        check_values(None, k.shape[0], k_pages, table, lengths, None, writes=True)
        places = last_slots(table, lengths, k_pages.shape[1])
    else:
        check_values(None, k.shape[0], k_pages, table, lengths, cu.numpy(), writes=True)
        slots = slots_of(table, lengths, cu.numpy(), k_pages.shape[1])
        check_slots(slots)
        places = np.stack(np.divmod(slots, k_pages.shape[1]))
        k, v = k[: len(slots)], v[: len(slots)]  # tokens behind the last offset belong to no sequence
    page, offset = torch.from_numpy(places)
    k_pages.index_put_((page, offset), k)
    v_pages.index_put_((page, offset), v)


def append_on_gpu(k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any) -> None:
    """Writes k and v into the pages with a Triton kernel, which skips tokens without a valid slot."""
    from attn_core.paged import triton_tables

    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        # The pool is written in place, so a dense copy would lose the writes. k and v are only read, so they may be
        # copied.
        if tensor.stride(-1) != 1:
            raise ShapeError(f"{name}: expected dense channels (a last stride of 1), got {list(tensor.stride())}")
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k.detach(), v.detach()))
    table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    lengths = seq_lens.contiguous()
    widest = max(k.shape[2], v.shape[2])
    # One program for each head of each token. Without offsets any pointer will do, because ONE_QUERY makes the kernel
    # ignore it.
    triton_tables.append[(k.shape[0], k.shape[1])](
        *(k, v, k_pages, v_pages, table, lengths, lengths if cu is None else cu.contiguous()),
        *(k_pages.shape[0], table.shape[1], len(lengths)),
        *(*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], table.stride(0)),
        PAGE=k_pages.shape[1],
        HEAD_DIM=k.shape[2],
        VALUE_DIM=v.shape[2],
        # Triton's ranges have a power of two as length. The kernel loops if there are more than 1024 sequences.
        WIDE=1 << (widest - 1).bit_length(),
        ONE_QUERY=cu is None,
        SEQUENCES=min(1024, 1 << max(len(lengths) - 1, 0).bit_length()),
        num_warps=1 if widest <= 64 else 2,
    )
