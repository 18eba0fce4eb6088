"""Appends new keys and values to their pages: by indexing on a CPU, with our own kernel on a GPU.

Quantised pages get the numbers that ``attn_core.paged.quantised`` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch

from attn_core.call.pages import PagedKV
from attn_core.paged import arguments
from attn_core.paged.quantised.numbers import page_factors, stored_numbers, token_scales
from attn_core.paged.quantised.scales import STORED
from attn_core.paged.rotary import COS, SIN
from attn_core.paged.tables import FEW_ENTRIES, are_valid, last_places
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.offsets import clamp
from torch_frontend.dispatch.plan import Metadata
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.append_launch import append_on_gpu, repeated_on_gpu
from torch_frontend.paged.places import Places, gather, on_cpu
from torch_frontend.paged.plan import check_no_gradient

Tensor = torch.Tensor
_WITH_TABLES = ("k_pages", "v_pages", "k", "v", "block_table", "seq_lens")
"""The tensors of an append of one token for each sequence."""


def append(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    slot_mapping: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    interleaved: bool = False,
    k_scales: Any = None,
    v_scales: Any = None,
) -> None:
    """Checks the arguments of ``append_kv``, rotates k, and writes k and v into the pages, in place."""
    where = (block_table, seq_lens, cu_seqlens_q, slot_mapping, cos, sin, positions)
    if k_scales is v_scales is None:  # a call like an earlier one runs what that one prepared
        one_token_each = cu_seqlens_q is slot_mapping is cos is sin is positions is None
        others = (v, block_table, seq_lens) if one_token_each else (v, *where)
        write = find(_prepare, k_pages, v_pages, k, others, (interleaved,), None)
        if write is not None and write(k_pages, v_pages, k, *others):
            return
    for name, tensor in (("k_pages", k_pages), ("k", k)):
        plan.check_tensor(name, tensor)
    places, scales = gather(k, k_pages, Places(*where, interleaved)), (k_scales, v_scales)
    check_appended(k_pages, v_pages, k, v, places, scales)
    if k.shape[0] == 0:
        return
    with torch.no_grad():
        if k.device.type == "cpu":
            _append_on_cpu(k_pages, v_pages, k, v, places, scales)
        else:
            on_device(append_on_gpu, k.device)(k_pages, v_pages, k, v, *places, scales=scales)


def check_appended(
    k_pages: Any, v_pages: Any, k: Any, v: Any, places: Places, scales: tuple[Any, Any] = (None, None)
) -> None:
    """Checks the arguments of an append except the values of its tables. scales: k_scales and v_scales."""
    optional = {COS: places.cos, SIN: places.sin, "k_scales": scales[0], "v_scales": scales[1]}
    named = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v}
    named |= {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in named.items():
        plan.check_tensor(name, tensor)
        check_no_gradient(name, tensor)
    others = ("block_table", "seq_lens", "cu_seqlens_q", "slot_mapping", "positions")
    named |= {name: getattr(places, name) for name in others}
    tensor_kinds.check_data(k_pages, **{name: tensor for name, tensor in named.items() if name != "k_pages"})
    entries = tuple([(name, t.shape, t.dtype, t.device) for name, t in named.items() if t is not None])
    # Symbolic sizes cannot be compared. The op checks them when it runs.
    if all([type(size) is int for _, shape, *_ in entries for size in shape]):
        _check_metadata(entries)


@lru_cache(maxsize=1024)
def _check_metadata(entries: tuple[Any, ...]) -> None:
    """Checks (name, shape, dtype, device) of an append's tensors; those that passed before are not checked again."""
    arguments.check_append({name: plan.facts(*entry) for name, *entry in entries})


def _append_on_cpu(k_pages: Any, v_pages: Any, k: Any, v: Any, places: Places, scales: tuple[Any, Any]) -> None:
    """Checks the values of the tables and writes k and v into the pages by indexing."""
    by_name = {"k_scales": scales[0], "v_scales": scales[1]}
    k, v, where = on_cpu(k_pages, k.detach(), v.detach(), places, by_name)
    page, offset = torch.from_numpy(where)
    write_rows(k_pages, scales[0], (page, offset), k)
    write_rows(v_pages, scales[1], (page, offset), v)


def _prepare(request: Request) -> Prepared | None:
    """Prepares a write, on a CPU for one new token of each sequence, whose ``run`` returns whether it did.

    It does not if it does not know the values of the tables to be right; the general path names the wrong one.
    """
    k_pages, _, k, _, *where = request.entries
    (interleaved,) = request.options
    assert k_pages is not None and k is not None
    if request.needs:
        return None
    at = Places(*where)  # type: ignore[arg-type]
    if k[2].type == "cuda":
        write = gpu_writer(request.entries, interleaved)
        return None if write is None else Prepared(write, lambda: write)
    others = at.cu_seqlens_q, at.slot_mapping, at.cos, at.positions
    if k[2].type != "cpu" or any(each is not None for each in others) or k[0][0] == 0:
        return None
    _check_metadata(_named(request.entries))
    table, lengths = where[:2]
    if table is None or lengths is None or torch.int64 in (table[1], lengths[1]):  # the general path casts tables
        return None
    paged = PagedKV(num_pages=k_pages[0][0], page_size=k_pages[0][1], width=table[0][1])
    least = [1] * k[0][0]

    def write_on_cpu(
        k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, *_: None
    ) -> bool:
        if table.numel() > FEW_ENTRIES:
            return False
        rows, ends = table.tolist(), lengths.tolist()
        if not are_valid(paged, rows, ends, least):
            return False
        places = last_places(rows, ends, paged.page_size)
        if len(set(places)) < len(places):
            return False
        index = torch.from_numpy(np.array(places, np.int64).T).unbind()
        k_pages.index_put_(index, k)
        v_pages.index_put_(index, v)
        return True

    return Prepared(write_on_cpu, lambda: write_on_cpu, "all")


def gpu_writer(entries: Sequence[Metadata | None], interleaved: bool, added: int = 0) -> Callable[..., bool] | None:
    """Checks the metadata of an append on a GPU, and returns a function of its tensors that writes k and v.

    None for a call without tokens, and for one whose offsets the general path casts.

    Args:
        entries: of k_pages, v_pages, k, v and the tensors of ``Places``.
        added: see ``append_on_gpu``. If it is not 0, the function takes the tensors that there are, and then grown.
    """
    _check_metadata(_named(entries))
    at: Any = Places(*entries[4:])  # type: ignore[arg-type]
    k, offsets = entries[2], at.cu_seqlens_q
    assert k is not None
    if k[0][0] == 0 or (offsets is not None and offsets[1] is not torch.int32):
        return None
    names = tuple([name for name, entry in zip(Places._fields, entries[4:]) if entry is not None])
    launch = on_device(repeated_on_gpu(interleaved, names, added), k[2])
    if added:
        return launch  # type: ignore[no-any-return]
    return partial(_write_on_gpu, launch) if len(entries) > len(_WITH_TABLES) else launch


def _write_on_gpu(
    launch: Callable[..., bool], k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, *tables: Any
) -> bool:
    where = Places(*tables)
    if where.cu_seqlens_q is not None:  # as in the general path: a token outside of all documents is written nowhere
        where = where._replace(cu_seqlens_q=clamp(where.cu_seqlens_q, k.shape[0]))
    return launch(k_pages, v_pages, k, v, *[each for each in where[:7] if each is not None])


def _named(entries: Sequence[Metadata | None]) -> tuple[Any, ...]:
    """Returns (argument, shape, dtype, device) of the tensors of an append that there are."""
    names = (*_WITH_TABLES, "cu_seqlens_q", "slot_mapping", COS, SIN, "positions")
    return tuple([(name, *entry) for name, entry in zip(names, entries) if entry is not None])


def write_rows(pages: Tensor, scales: Tensor | None, places: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Writes rows ``[tokens, kv_heads, dim]`` to their pages and offsets, quantised if there are scales."""
    if scales is None:
        pages.index_put_(places, rows)
        return
    dtype = STORED[str(pages.dtype).removeprefix("torch.")]
    numbers = rows.float()
    if scales.dim() == 3:
        new, factors = token_scales(torch, numbers, dtype)
        scales.index_put_(places, new)
    else:
        factors = page_factors(torch, scales[places[0]])
    # torch can index bytes; not every version can index float8.
    bytes_of = pages.view(torch.uint8) if dtype == "float8_e4m3fn" else pages
    bytes_of.index_put_(places, stored_numbers(torch, numbers, factors, dtype).view(bytes_of.dtype))
