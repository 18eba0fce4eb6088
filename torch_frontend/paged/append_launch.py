"""Launches our kernel that appends new keys and values to their pages on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import itemgetter
from typing import Any

import torch

from attn_core.backends.shared.programs.triton import Description, Direct, launch
from attn_core.errors import ShapeError
from attn_core.paged.quantised.scales import STORED
from torch_frontend.paged.places import Places

Tensor = torch.Tensor
MOST_LAYOUTS = 64
"""The most strides whose launches ``repeated_on_gpu`` remembers for one metadata."""


TABLES = ("block_table", "seq_lens")
"""The fields of ``Places`` of an append with one token for each sequence."""


def repeated_on_gpu(interleaved: bool = False, names: tuple[str, ...] = TABLES, added: int = 0) -> Callable[..., bool]:
    """Returns ``append_on_gpu`` for tensors of one metadata, which repeats its launches by the tensors' strides.

    Its arguments are k_pages, v_pages, k, v, the tensors of ``Places`` that the call has and, if added is not 0, grown.

    Args:
        names: the fields of ``Places`` of these tensors, in the order of ``Places``.
        added: see ``append_on_gpu``.
    """
    seen: dict[Hashable, Direct] = {}
    fields = Places._fields[:7]
    own: list[Any] = [4 + names.index(name) if name in names else None for name in fields]
    some = own[1] if own[3] is None else own[3]  # for tensors that are not read, see append_on_gpu
    last = 4 + len(names) if added else some
    # The kernel's tensors by their numbers among k, v, k_pages, v_pages and those of ``names``; then scales and grown.
    order = (0, 1, 2, 3, *[some if at is None else at for at in own], *[some] * 2, last)
    in_order: Callable[[list[int]], tuple[int, ...]] = itemgetter(*order)

    def write(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> bool:
        tensors = (k, v, k_pages, v_pages, *others)
        strides = tuple([tensor.stride() for tensor in tensors])
        addresses = [tensor.data_ptr() for tensor in tensors]
        direct = seen.get(strides)
        if direct is not None and not any([address & 15 for address in addresses]):
            direct(*in_order(addresses))
            return True
        places = [None if at is None else tensors[at] for at in own]
        grown = tensors[-1] if added else None
        direct = append_on_gpu(k_pages, v_pages, k, v, *places, interleaved, grown=grown, added=added)
        if direct is not None:
            if len(seen) >= MOST_LAYOUTS:
                seen.clear()
            seen[strides] = direct
        return True

    return write


def append_on_gpu(
    k_pages: Any,
    v_pages: Any,
    k: Any,
    v: Any,
    *where: Any,
    scales: tuple[Any, Any] = (None, None),
    grown: Any = None,
    added: int = 0,
) -> Direct | None:
    """Writes k and v into the pages with a Triton kernel, which skips tokens without a valid slot.

    Args:
        where: the fields of ``Places``. scales: of quantised pages, k_scales and v_scales.
        grown: dense, like seq_lens; lengths that count the new tokens are written here if added is not 0.
        added: 0 if seq_lens count the new tokens. Else each sequence has so many, and seq_lens do not count them.

    Returns the direct launch, see ``triton.launch``, if it fits other tensors with the metadata and strides of these.
    """
    from attn_core.paged import triton_tables
    from attn_core.paged.quantised import triton_quantise

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
    dtype = STORED.get(str(k_pages.dtype).removeprefix("torch."))
    if dtype == "float8_e4m3fn":  # the kernel writes bytes
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    by = None if scales[0] is None else "token" if scales[0].dim() == 3 else "page"
    rest = (*others, *scales, grown)
    tensors = (k, v, k_pages, v_pages, *[some if each is None else each for each in rest])
    sizes, table, lengths = (*k.shape, v.shape[2], k_pages.shape[1]), tensors[4], tensors[5]
    numbers = (
        *(k_pages.shape[0], table.shape[-1] if is_table else 0, len(lengths), angles),
        *(*k.stride()[:2], *v.stride()[:2], *k_pages.stride()[:3], *v_pages.stride()[:3]),
        *(table.stride(0), *[each.stride(0) if turned else 0 for each in tensors[8:10]]),
        *[stride for each in scales for stride in ((0, 0, 0) if each is None else _scale_strides(each))],
    )
    flags = (at.cu_seqlens_q is None, not is_table, 2 * turned, at.interleaved, at.positions is not None)

    def describe() -> Description:
        tokens, heads, head_dim, value_dim, page_size = sizes
        widest = max(head_dim, value_dim)
        constants = {
            **{"PAGE": page_size, "HEAD_DIM": head_dim, "VALUE_DIM": value_dim},
            **dict(zip(("ONE_QUERY", "SLOTS", "ROTARY_DIM", "INTERLEAVED", "POSITIONS"), flags, strict=True)),
            **{"DOUBLE": k.dtype == torch.float64, "ADDED": added},
            # Triton's ranges have a power of two as length. The kernel loops if there are more than 1024 sequences.
            "WIDE": 1 << (widest - 1).bit_length(),
            "SEQUENCES": min(1024, 1 << max(len(lengths) - 1, 0).bit_length()),
            **triton_quantise.constants(dtype, by),
            # One warp finds the largest magnitude of a quantised row without waiting for another. Fusing would round
            # otherwise than JAX, see attn_core.paged.rotary.
            **{"num_warps": 1 if widest <= 64 or dtype else 2, "enable_fp_fusion": False},
        }
        return (tokens, heads, 1), numbers, constants  # a program for each head of each token

    # Tests run the kernel on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if k.is_cuda else -1
    key = ("append", tuple([each.dtype for each in tensors]), dtype, by, added, sizes, numbers, flags, current)
    direct = launch(triton_tables.append, key, tensors, describe)
    copied = [mine is not None and mine.data_ptr() != own.data_ptr() for mine, own in zip(read, (k, v, *others))]
    return None if any(copied) else direct


def _scale_strides(scales: Tensor) -> tuple[int, int, int]:
    """Returns the strides of scales by page, slot and head. All slots of a page share a scale by page."""
    return (scales.stride(0), 0, scales.stride(1)) if scales.dim() == 2 else scales.stride()  # type: ignore[return-value]
