"""Appends new keys and values to their pages: by indexing on a CPU, with our own kernel on a GPU.

Quantised pages get the numbers that ``attn_core.paged.quantised`` defines.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from attn_core.call.pages import PagedKV
from attn_core.paged import arguments
from attn_core.paged.quantised.numbers import page_factors, stored_numbers, token_scales
from attn_core.paged.quantised.scales import STORED
from attn_core.paged.rotary import COS, SIN
from attn_core.paged.tables import FEW_ENTRIES, are_valid, last_places
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged import seen_appends
from torch_frontend.paged.append_launch import TABLES, append_on_gpu, repeated_on_gpu
from torch_frontend.paged.places import Places, gather, on_cpu
from torch_frontend.paged.plan import check_no_gradient

Tensor = torch.Tensor
_STRIDED = torch.strided


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
    rotary = None if cos is None else (cos, sin, interleaved)
    is_usual = cu_seqlens_q is slot_mapping is positions is k_scales is v_scales is None
    if is_usual and _append_as_before(k_pages, v_pages, k, v, block_table, seq_lens, rotary):
        return
    where = (block_table, seq_lens, cu_seqlens_q, slot_mapping, cos, sin, positions)
    if (
        not is_usual
        and k_scales is v_scales is None
        and seen_appends.append((k_pages, v_pages, k, v), where, interleaved)
    ):
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


def _append_as_before(
    k_pages: Any, v_pages: Any, k: Any, v: Any, table: Any, lengths: Any, rotary: tuple[Any, Any, bool] | None = None
) -> bool:
    """Writes one new token of each sequence, with one lookup by metadata instead of many checks.

    Args:
        rotary: cos, sin and whether pairs are interleaved.

    Returns whether it did. If not, ``append`` accepts the arguments or names them in an error.
    """
    if not (type(k_pages) is type(v_pages) is type(k) is type(v) is type(table) is type(lengths) is Tensor):
        return False
    if not (k_pages.layout is v_pages.layout is k.layout is v.layout is table.layout is lengths.layout is _STRIDED):
        return False
    try:
        if forward_ad._current_level >= 0 or (rotary is not None and not _are_plain(rotary[:2])):
            return False
        if torch.is_grad_enabled() and any([each.requires_grad for each in (k_pages, v_pages, k, v)]):
            return False
        if k.is_cpu:
            for each in (k_pages, v_pages, k, v, table, lengths):
                if each.untyped_storage().nbytes() < each.nbytes and not tensor_kinds.fits_its_storage(each):
                    return False
        if any(map(torch._is_functional_tensor, (k_pages, v_pages, k, v))):
            return False
        write = _writer(
            *(k_pages.shape, v_pages.shape, k.shape, v.shape, table.shape, lengths.shape),
            *(k_pages.dtype, v_pages.dtype, k.dtype, v.dtype, table.dtype, lengths.dtype),
            *(k_pages.device, v_pages.device, k.device, v.device, table.device, lengths.device),
            *(() if rotary is None else _metadata_of(*rotary)),
        )
    except Exception:  # a nested tensor has no shape; the general path raises the error again, or an earlier one
        return False
    return write is not None and write(k_pages, v_pages, k, v, table, lengths, *(() if rotary is None else rotary[:2]))


def _are_plain(tables: tuple[Any, ...]) -> bool:
    """Returns whether cos and sin are plain tensors on a GPU; the general path rotates on a CPU."""
    for each in tables:
        if type(each) is not Tensor or each.layout is not _STRIDED or not each.is_cuda:
            return False
        if torch._is_functional_tensor(each) or (each.requires_grad and torch.is_grad_enabled()):
            return False
    return True


def _metadata_of(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Any, ...]:
    return cos.shape, cos.dtype, cos.device, sin.shape, sin.dtype, sin.device, interleaved


@lru_cache(maxsize=1024)
def _writer(*metadata: Any) -> Callable[..., bool] | None:
    """Checks the metadata of six tensors, and returns a function of the tensors that writes k and v.

    The function returns False for values of tables that it does not know to be right. None for calls without tokens.

    Args:
        metadata: the shapes, the dtypes, then the devices of (k_pages, v_pages, k, v, block_table, seq_lens); then,
            with rotary, the result of ``_metadata_of``.
    """
    names = ("k_pages", "v_pages", "k", "v", "block_table", "seq_lens")
    rotary = metadata[18:]
    tables = ((COS, *rotary[:3]), (SIN, *rotary[3:6])) if rotary else ()
    _check_metadata((*zip(names, metadata[:6], metadata[6:12], metadata[12:18], strict=True), *tables))
    (num_pages, page_size, *_), tokens, width = metadata[0], metadata[2][0], metadata[4][1]
    device = metadata[12]
    if tokens == 0 or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda":
        repeated = repeated_on_gpu(bool(rotary and rotary[6]), (*TABLES, "cos", "sin") if rotary else TABLES)
        return on_device(repeated, device)  # type: ignore[no-any-return]
    if torch.int64 in metadata[10:12]:  # the general path casts tables
        return None
    paged, least = PagedKV(num_pages=num_pages, page_size=page_size, width=width), [1] * tokens

    def write(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> bool:
        if table.numel() > FEW_ENTRIES:
            return False
        rows, ends = table.tolist(), lengths.tolist()
        if not are_valid(paged, rows, ends, least):
            return False
        places = last_places(rows, ends, page_size)
        if len(set(places)) < len(places):
            return False
        index = torch.from_numpy(np.array(places, np.int64).T).unbind()
        k_pages.index_put_(index, k)
        v_pages.index_put_(index, v)
        return True

    return write


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
