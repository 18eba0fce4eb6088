"""Appends new keys and values to their pages: by indexing on a CPU, with our own kernel on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.autograd import forward_ad

from attn_core.backends.shared.triton import Description, Direct, launch
from attn_core.call.pages import PagedKV
from attn_core.errors import ShapeError
from attn_core.paged import arguments
from attn_core.paged.scales import STORED, check_used_scales
from attn_core.paged.tables import FEW_ENTRIES, are_valid, check_slots, last_places, last_slots, slots_of
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.plan import check_no_gradient, check_values, tables_of
from torch_frontend.paged.quantise import write as write_rows

Tensor = torch.Tensor
_STRIDED = torch.strided
MOST_LAYOUTS = 64
"""The most strides whose launches ``_repeated_on_gpu`` remembers for one metadata."""


def append(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any,
    k_scales: Any = None,
    v_scales: Any = None,
) -> None:
    """Checks the arguments of ``append_kv`` and writes k and v into the pages, in place."""
    if cu_seqlens_q is k_scales is v_scales is None and _append_as_before(
        k_pages, v_pages, k, v, block_table, seq_lens
    ):
        return
    for name, tensor in (("k_pages", k_pages), ("k", k)):
        plan.check_tensor(name, tensor)
    block_table, seq_lens, cu = tables_of(k, k_pages, None, block_table, seq_lens, cu_seqlens_q)
    scales = k_scales, v_scales
    check_appended(k_pages, v_pages, k, v, block_table, seq_lens, cu, scales)
    if k.shape[0] == 0:
        return
    with torch.no_grad():
        if k.device.type == "cpu":
            _append_on_cpu(k_pages, v_pages, k, v, block_table, seq_lens, cu, scales)
        else:
            on_device(append_on_gpu, k.device)(k_pages, v_pages, k, v, block_table, seq_lens, cu, scales)


def check_appended(
    k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any, scales: Any
) -> None:
    """Checks the arguments of an append except the values of its tables."""
    scaled = dict(zip(("k_scales", "v_scales"), scales, strict=True))
    for name, tensor in {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, **scaled}.items():
        if tensor is not None or name not in scaled:
            plan.check_tensor(name, tensor)
            check_no_gradient(name, tensor)
    tensor_kinds.check_data(
        k_pages, v_pages=v_pages, k=k, v=v, block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu, **scaled
    )
    tensors = (k_pages, v_pages, k, v, block_table, seq_lens, cu, *scales)
    entries = tuple([None if t is None else (t.shape, t.dtype, t.device) for t in tensors])
    # Symbolic sizes cannot be compared. The op checks them when it runs.
    if all([type(size) is int for entry in entries if entry for size in entry[0]]):
        _check_metadata(entries)


@lru_cache(maxsize=1024)
def _check_metadata(entries: tuple[plan.Metadata | None, ...]) -> None:
    """Checks the metadata of an append's tensors; a call whose metadata passed before is not checked again."""
    names = ("k_pages", "v_pages", "k", "v", "block_table", "seq_lens", "cu_seqlens_q", "k_scales", "v_scales")
    arguments.check_append(
        {name: None if entry is None else plan.facts(*entry) for name, entry in zip(names, entries, strict=True)}
    )


def _append_on_cpu(
    k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any, scales: Any
) -> None:
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
    if scales[0] is not None and scales[0].dim() == 2:
        by_page = {name: each.numpy() for name, each in zip(("k_scales", "v_scales"), scales, strict=True)}
        check_used_scales(by_page, places[0] * k_pages.shape[1] + places[1], k_pages.shape[1])
    write_rows(k_pages, scales[0], (page, offset), k)
    write_rows(v_pages, scales[1], (page, offset), v)


def _append_as_before(k_pages: Any, v_pages: Any, k: Any, v: Any, table: Any, lengths: Any) -> bool:
    """Writes one new token of each sequence, with one lookup by metadata instead of many checks.

    Returns whether it did. If not, ``append`` accepts the arguments or names them in an error.
    """
    if not (type(k_pages) is type(v_pages) is type(k) is type(v) is type(table) is type(lengths) is Tensor):
        return False
    if not (k_pages.layout is v_pages.layout is k.layout is v.layout is table.layout is lengths.layout is _STRIDED):
        return False
    try:
        if forward_ad._current_level >= 0:
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
        )
    except Exception:  # a nested tensor has no shape; the general path raises the error again, or an earlier one
        return False
    return write is not None and write(k_pages, v_pages, k, v, table, lengths)


@lru_cache(maxsize=1024)
def _writer(*metadata: Any) -> Callable[..., bool] | None:
    """Checks the metadata of six tensors, and returns a function of the tensors that writes k and v.

    The function returns False for values of tables that it does not know to be right. None for calls without tokens.

    Args:
        metadata: the shapes, the dtypes, then the devices of (k_pages, v_pages, k, v, block_table, seq_lens).
    """
    _check_metadata((*zip(metadata[:6], metadata[6:12], metadata[12:], strict=True), None, None, None))
    (num_pages, page_size, *_), tokens, width = metadata[0], metadata[2][0], metadata[4][1]
    device = metadata[12]
    if tokens == 0 or device.type not in ("cpu", "cuda"):
        return None
    if device.type == "cuda":
        return on_device(_repeated_on_gpu(), device)  # type: ignore[no-any-return]
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


def _repeated_on_gpu() -> Callable[..., bool]:
    """Returns ``append_on_gpu`` of one token for each sequence, which repeats its launches by the tensors' strides."""
    seen: dict[Hashable, Direct] = {}

    def write(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> bool:
        tensors = (k, v, k_pages, v_pages, table, lengths)
        strides = (k.stride(), v.stride(), k_pages.stride(), v_pages.stride(), table.stride(), lengths.stride())
        addresses = [tensor.data_ptr() for tensor in tensors]
        direct = seen.get(strides)
        if direct is not None and not any([address & 15 for address in addresses]):
            direct(*addresses, *[addresses[5]] * 3)  # the last tensors are not read, see append_on_gpu
            return True
        direct = append_on_gpu(k_pages, v_pages, k, v, table, lengths, None)
        if direct is not None:
            if len(seen) >= MOST_LAYOUTS:
                seen.clear()
            seen[strides] = direct
        return True

    return write


def append_on_gpu(
    k_pages: Any, v_pages: Any, k: Any, v: Any, block_table: Any, seq_lens: Any, cu: Any, scales: Any = (None, None)
) -> Direct | None:
    """Writes k and v into the pages with a Triton kernel, which skips tokens without a valid slot.

    Returns the direct launch, see ``triton.launch``, if it fits other tensors with the metadata and strides of these.
    """
    from attn_core.paged import triton_quantise, triton_tables

    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        # The pool is written in place, so a dense copy would lose the writes. k and v are only read, so they may be
        # copied.
        if tensor.stride(-1) != 1:
            raise ShapeError(f"{name}: expected dense channels (a last stride of 1), got {list(tensor.stride())}")
    read = k, v, block_table, seq_lens
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k.detach(), v.detach()))
    table = block_table if block_table.stride(-1) == 1 else block_table.contiguous()
    lengths = seq_lens.contiguous()
    # Without offsets any pointer will do, because ONE_QUERY makes the kernel ignore it.
    dtype = STORED.get(str(k_pages.dtype).removeprefix("torch."))
    if dtype == "float8_e4m3fn":  # the kernel writes bytes
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    strides = [(0, 0, 0) if each is None else _scale_strides(each) for each in scales]
    offsets = lengths if cu is None else cu.contiguous()
    by = None if scales[0] is None else "token" if scales[0].dim() == 3 else "page"
    tensors = (k, v, k_pages, v_pages, table, lengths, offsets, *((lengths, lengths) if by is None else scales))
    numbers = (
        *(k_pages.shape[0], table.shape[1], len(lengths)),
        *(*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3], table.stride(0)),
        *(*strides[0], *strides[1]),
    )
    sizes = (*k.shape, v.shape[2], k_pages.shape[1])

    def describe() -> Description:
        tokens, heads, head_dim, value_dim, page_size = sizes
        widest = max(head_dim, value_dim)
        constants = {
            **{"PAGE": page_size, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "ONE_QUERY": cu is None},
            # Triton's ranges have a power of two as length. The kernel loops if there are more than 1024 sequences.
            "WIDE": 1 << (widest - 1).bit_length(),
            "SEQUENCES": min(1024, 1 << max(len(lengths) - 1, 0).bit_length()),
            **triton_quantise.constants(dtype, by),
            "num_warps": 1 if widest <= 64 else 2,
        }
        return (tokens, heads, 1), numbers, constants  # one program for each head of each token

    # Tests run the kernel on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if k.is_cuda else -1
    key = ("append", k.dtype, v.dtype, dtype, by, sizes, numbers, cu is None, current)
    direct = launch(triton_tables.append, key, tensors, describe)
    copied = any([given.data_ptr() != own.data_ptr() for given, own in zip(read, (k, v, table, lengths))])
    return None if copied else direct


def _scale_strides(scales: Tensor) -> tuple[int, int, int]:
    """Returns the strides of scales by page, slot and head. All slots of a page share a scale by page."""
    return (scales.stride(0), 0, scales.stride(1)) if scales.dim() == 2 else scales.stride()  # type: ignore[return-value]
