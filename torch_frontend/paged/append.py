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
from attn_core.paged.rotary import COS, SIN
from attn_core.paged.tables import FEW_ENTRIES, are_valid, last_places
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.places import Places, gather, on_cpu
from torch_frontend.paged.plan import check_no_gradient

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
    slot_mapping: Any = None,
    cos: Any = None,
    sin: Any = None,
    positions: Any = None,
    interleaved: bool = False,
) -> None:
    """Checks the arguments of ``append_kv``, rotates k, and writes k and v into the pages, in place."""
    rotary = None if cos is None else (cos, sin, interleaved)
    is_usual = cu_seqlens_q is slot_mapping is positions is None
    if is_usual and _append_as_before(k_pages, v_pages, k, v, block_table, seq_lens, rotary):
        return
    for name, tensor in (("k_pages", k_pages), ("k", k)):
        plan.check_tensor(name, tensor)
    places = Places(block_table, seq_lens, cu_seqlens_q, slot_mapping, cos, sin, positions, interleaved)
    places = gather(k, k_pages, places)
    check_appended(k_pages, v_pages, k, v, places)
    if k.shape[0] == 0:
        return
    with torch.no_grad():
        if k.device.type == "cpu":
            new = on_cpu(k_pages, k.detach(), v.detach(), places)
            page, offset = torch.from_numpy(new[2])
            k_pages.index_put_((page, offset), new[0])
            v_pages.index_put_((page, offset), new[1])
        else:
            on_device(append_on_gpu, k.device)(k_pages, v_pages, k, v, *places)


def check_appended(k_pages: Any, v_pages: Any, k: Any, v: Any, places: Places) -> None:
    """Checks the arguments of an append except the values of its tables."""
    angles = {} if places.cos is None else {COS: places.cos, SIN: places.sin}
    named = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, **angles}
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
        return on_device(_repeated_on_gpu(bool(rotary and rotary[6])), device)  # type: ignore[no-any-return]
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


def _repeated_on_gpu(interleaved: bool = False) -> Callable[..., bool]:
    """Returns ``append_on_gpu`` of one token for each sequence, which repeats its launches by the tensors' strides.

    Its arguments are k_pages, v_pages, k, v, block_table and seq_lens, and cos and sin of keys that rotate.
    """
    seen: dict[Hashable, Direct] = {}

    def write(
        k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor, *rotary: Tensor
    ) -> bool:
        tensors = (k, v, k_pages, v_pages, table, lengths, *rotary)
        strides = tuple([tensor.stride() for tensor in tensors])
        addresses = [tensor.data_ptr() for tensor in tensors]
        direct = seen.get(strides)
        if direct is not None and not any([address & 15 for address in addresses]):
            absent = addresses[5]  # for tensors that are not read, see append_on_gpu
            angles = addresses[6:] or (absent, absent)
            direct(*addresses[:6], absent, absent, *angles, absent)
            return True
        places = Places(table, lengths, None, None, *(rotary or (None, None)), None, interleaved)  # type: ignore[call-arg]
        direct = append_on_gpu(k_pages, v_pages, k, v, *places)
        if direct is not None:
            if len(seen) >= MOST_LAYOUTS:
                seen.clear()
            seen[strides] = direct
        return True

    return write


def append_on_gpu(k_pages: Any, v_pages: Any, k: Any, v: Any, *where: Any) -> Direct | None:
    """Writes k and v into the pages with a Triton kernel, which skips tokens without a valid slot.

    Args:
        where: the fields of ``Places``.

    Returns the direct launch, see ``triton.launch``, if it fits other tensors with the metadata and strides of these.
    """
    from attn_core.paged import triton_tables

    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        # The pool is written in place, so a dense copy would lose the writes. k and v are only read, so they may be
        # copied.
        if tensor.stride(-1) != 1:
            raise ShapeError(f"{name}: expected dense channels (a last stride of 1), got {list(tensor.stride())}")
    read = k.detach(), v.detach(), *Places(*where)[:7]
    k, v, *others = [each if each is None or each.stride(-1) == 1 else each.contiguous() for each in read]
    at = Places(*others, *where[7:])  # type: ignore[arg-type, call-arg]
    is_table, (angles, turned) = at.slot_mapping is None, (1, 0) if at.cos is None else at.cos.shape
    # For absent tensors any pointer will do, because the kernel's constants make it ignore them.
    some = at.seq_lens if is_table else at.slot_mapping
    tensors = (k, v, k_pages, v_pages, *[some if each is None else each for each in others])
    sizes, table, lengths = (*k.shape, v.shape[2], k_pages.shape[1]), tensors[4], tensors[5]
    numbers = (
        *(k_pages.shape[0], table.shape[-1] if is_table else 0, len(lengths), angles),
        *(*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3]),
        *(table.stride(0), *[each.stride(0) if turned else 0 for each in tensors[8:10]]),
    )
    flags = (at.cu_seqlens_q is None, not is_table, 2 * turned, at.interleaved, at.positions is not None)

    def describe() -> Description:
        tokens, heads, head_dim, value_dim, page_size = sizes
        widest = max(head_dim, value_dim)
        constants = {
            **{"PAGE": page_size, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim},
            **dict(zip(("ONE_QUERY", "SLOTS", "ROTARY_DIM", "INTERLEAVED", "POSITIONS"), flags, strict=True)),
            "DOUBLE": k.dtype == torch.float64,
            # Triton's ranges have a power of two as length. The kernel loops if there are more than 1024 sequences.
            "WIDE": 1 << (widest - 1).bit_length(),
            "SEQUENCES": min(1024, 1 << max(len(lengths) - 1, 0).bit_length()),
            **{"num_warps": 1 if widest <= 64 else 2, "enable_fp_fusion": False},  # see attn_core.paged.rotary
        }
        return (tokens, heads, 1), numbers, constants  # one program for each head of each token

    # Tests run the kernel on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if k.is_cuda else -1
    key = ("append", tuple([each.dtype for each in tensors]), sizes, numbers, flags, current)
    direct = launch(triton_tables.append, key, tensors, describe)
    copied = [mine is not None and mine.data_ptr() != own.data_ptr() for mine, own in zip(read, (k, v, *others))]
    return None if any(copied) else direct
