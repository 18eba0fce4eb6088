"""append_kv: writes new keys and values into their pages, by indexing on a CPU, with our own kernel on a GPU.

Quantised pages get the numbers that ``attn_core.paged.quantised`` defines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any, NamedTuple, Never

import numpy as np
import torch

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.triton import Description, Direct, launch, remember
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.spec import PagedKV
from attn_core.errors import ShapeError
from attn_core.paged import arguments
from attn_core.paged import tables as paged_tables
from attn_core.paged.arguments import check_choice
from attn_core.paged.quantised import STORED, page_factors, stored_numbers, token_scales
from attn_core.paged.rotary import COS, SIN, pair_of
from attn_core.paged.tables import FEW_ENTRIES, are_valid, last_places
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.offsets import clamp
from torch_frontend.dispatch.plan import Metadata, on_device
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.paged.plan import check_no_gradient
from torch_frontend.paged.rotary import rotate
from torch_frontend.paged.tables import index_of, op_tables, tables_of

Tensor = torch.Tensor
Scales = tuple[Tensor | None, Tensor | None]
TABLES = ("block_table", "seq_lens")
"""The fields of ``Places`` of an append with one token for each sequence."""
_WITH_TABLES = ("k_pages", "v_pages", "k", "v", *TABLES)
"""The tensors of an append of one token for each sequence."""


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


@hide_unknown
def append_kv(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_table: Tensor | np.ndarray | None = None,
    seq_lens: Tensor | np.ndarray | None = None,
    cu_seqlens_q: Tensor | np.ndarray | None = None,
    slot_mapping: Tensor | np.ndarray | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_interleaved: bool = False,
    positions: Tensor | np.ndarray | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    **unknown: Never,
) -> tuple[Tensor, ...]:
    """Writes the keys and values of new tokens into their sequences' pages, in place.

    Args:
        k_pages, v_pages: the pool, as in ``paged_attention``; modified in place.
        k, v: ``[tokens, kv_heads, dim]``, in the pool's dtype: the new tokens of each sequence, end to end. For
            quantised pages in bfloat16, float16 or float32.
        block_table, seq_lens, cu_seqlens_q: as in ``paged_attention``; ``seq_lens`` count the new tokens.
        slot_mapping: in place of these tables, int32 or int64 ``[tokens]``: the slot of each token, which is ``page *
            page_size + offset``; -1 for a token that is not written. A tensor or a numpy array.
        rotary: (cos, sin), each ``[max_positions, rotary_dim / 2]``: the keys are rotated as by ``apply_rotary``.
        rotary_interleaved: as ``interleaved`` there.
        positions: with rotary, int32 or int64 ``[tokens]``: each token's position in its sequence. The tables say it,
            too; slot_mapping does not.
        k_scales, v_scales: the scales of quantised pages, as in ``paged_attention``. Scales by token are written, too:
            each becomes the largest magnitude of its token and head, divided by the largest stored number, and NaN for
            a token with NaN or Inf. Scales by page are read: numbers beyond them saturate.

    Returns:
        ``(k_pages, v_pages)``, the same tensors; with scales also ``k_scales, v_scales``.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and for tables on the CPU that point
            outside the pool or send two tokens to one slot, or positions behind the rows of cos. On a GPU a token
            without a valid slot is skipped, and positions are clamped.
    """
    if unknown:
        refuse_keywords(append_kv, unknown)
    cos, sin = (None, None) if rotary is None else pair_of(rotary)
    if slot_mapping is not None or rotary_interleaved is not False or positions is not None:
        tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
        check_choice(tables, slot_mapping, cos, rotary_interleaved, positions)
    # In the order of Places, as the op has them.
    where: tuple[Any, ...] = (
        block_table,
        seq_lens,
        cu_seqlens_q,
        slot_mapping,
        cos,
        sin,
        positions,
        rotary_interleaved,
    )
    scales = k_scales, v_scales
    if k_scales is v_scales is None and _repeated(k_pages, v_pages, k, v, where):
        return k_pages, v_pages
    if torch.compiler.is_compiling():
        named: dict[str, Any] = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v, COS: cos, SIN: sin}
        for name, tensor in (named | {"k_scales": k_scales, "v_scales": v_scales}).items():
            if tensor is not None or name in ("k_pages", "v_pages"):
                plan.check_tensor(name, tensor)
                check_no_gradient(name, tensor)
        torch.ops.attn.append_kv(k_pages, v_pages, k, v, *where, *scales)
    elif tensor_kinds.is_watched(k):
        plan.check_tensor("k", k)
        places = gather(k, k_pages, Places(*where), in_op=True)
        check_appended(k_pages, v_pages, k, v, places, scales)
        torch.ops.attn.append_kv(k_pages, v_pages, k, v, *places, *scales)
    else:
        _append(k_pages, v_pages, k, v, Places(*where), scales)
    if k_scales is v_scales is None:
        return k_pages, v_pages
    return (k_pages, v_pages, *[each for each in scales if each is not None])


def _append_op(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> None:
    """Writes k and v into the pages. arguments: the fields of ``Places``, then k_scales and v_scales."""
    *where, k_scales, v_scales = arguments
    if not (k_scales is v_scales is None and _repeated(k_pages, v_pages, k, v, tuple(where))):
        _append(k_pages, v_pages, k, v, Places(*where), (k_scales, v_scales))


def _repeated(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, where: tuple[Any, ...]) -> bool:
    """Runs what a call like an earlier one prepared; returns whether it wrote k and v. where: the fields of Places."""
    block_table, seq_lens, cu_seqlens_q, slot_mapping, cos, sin, positions, interleaved = where
    others: tuple[Any, ...] = (v, block_table, seq_lens)
    if not (cu_seqlens_q is slot_mapping is cos is sin is positions is None):
        others = (*others, cu_seqlens_q, slot_mapping, cos, sin, positions)
    write = find(_prepare, k_pages, v_pages, k, others, (interleaved,), None)
    return write is not None and write(k_pages, v_pages, k, *others)


def _append(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, places: Places, scales: Scales) -> None:
    """Checks tokens and their places, and writes the tokens into the pool."""
    for name, tensor in (("k_pages", k_pages), ("k", k)):
        plan.check_tensor(name, tensor)
    places = gather(k, k_pages, places)
    check_appended(k_pages, v_pages, k, v, places, scales)
    if k.shape[0] == 0:
        return
    if k.device.type == "cpu":
        _append_on_cpu(k_pages, v_pages, k, v, places, scales)
    else:
        on_device(append_on_gpu, k.device)(k_pages, v_pages, k, v, *places, scales=scales)


def gather(k: Tensor, k_pages: Tensor, places: Places, *, in_op: bool = False) -> Places:
    """Returns places whose arrays are tensors on one device. ``_append`` checks the values of those on the CPU.

    in_op: whether the append becomes one op, which checks the values of all when it runs.
    """
    slots: Any = places.slot_mapping
    if places.positions is not None:
        places = places._replace(positions=index_of(k, "positions", places.positions))
    if slots is None:
        where = places.block_table, places.seq_lens, places.cu_seqlens_q
        table, lengths, offsets = op_tables(k, *where) if in_op else tables_of(k, k_pages, None, *where)
        return places._replace(block_table=table, seq_lens=lengths, cu_seqlens_q=offsets)
    is_known = isinstance(slots, np.ndarray) and not in_op
    if is_known and slots.ndim == 1 and k_pages.dim() == 4 and slots.dtype.kind == "i":
        paged_tables.check_slot_values(slots, *k_pages.shape[:2])
    return places._replace(slot_mapping=index_of(k, "slot_mapping", slots))


def check_appended(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, places: Places, scales: Scales = (None, None)
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


@without_gradient
def _append_on_cpu(k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, places: Places, scales: Scales) -> None:
    """Checks the values of the tables, rotates the keys, and writes k and v into the pages by indexing."""
    named = {name: getattr(places, name) for name in (*paged_tables.TABLES, "slot_mapping", "positions")}
    named |= dict(zip(paged_tables.SCALES, scales, strict=True))
    on_host = {name: None if tensor is None else tensor.numpy() for name, tensor in named.items()}
    cos, sin, pool = places.cos, places.sin, (k_pages.shape[0], k_pages.shape[1])
    written = paged_tables.places_of_append(k.shape[0], pool, on_host, None if cos is None else cos.shape[0])
    assert written is not None
    at = written.tokens if isinstance(written.tokens, slice) else torch.from_numpy(written.tokens)
    k, v = k.detach()[at], v.detach()[at]
    if cos is not None and sin is not None and written.positions is not None:
        # Quantised pages have bytes. Nothing rounds a rotated key before it is quantised.
        dtype = torch.float32 if k_pages.itemsize == 1 else k_pages.dtype
        positions = torch.from_numpy(written.positions)
        k = rotate(k, cos.detach(), sin.detach(), positions, places.interleaved, dtype)
    page, offset = torch.from_numpy(written.places)
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
        remember(seen, strides, direct)
        return True

    return write


@without_gradient
def append_on_gpu(
    k_pages: Tensor,
    v_pages: Tensor,
    k: Tensor,
    v: Tensor,
    *where: Any,
    scales: Scales = (None, None),
    grown: Tensor | None = None,
    added: int = 0,
) -> Direct | None:
    """Writes k and v into the pages with a Triton kernel, which skips tokens without a valid slot.

    Args:
        where: the fields of ``Places``. scales: of quantised pages, k_scales and v_scales.
        grown: dense, like seq_lens; lengths that count the new tokens are written here if added is not 0.
        added: 0 if seq_lens count the new tokens. Else each sequence has so many, and seq_lens do not count them.

    Returns the direct launch, see ``triton.launch``, if it fits other tensors with the metadata and strides of these.
    """
    from attn_core.paged import kernels

    for name, tensor in (("k_pages", k_pages), ("v_pages", v_pages)):
        # The pool is written in place, so a dense copy would lose the writes. k and v are only read, so they may be
        # copied.
        if tensor.stride(-1) != 1:
            raise ShapeError(f"{name}: expected dense channels (a last stride of 1), got {list(tensor.stride())}")
    read: tuple[Any, ...] = k.detach(), v.detach(), *Places(*where)[:7]
    k, v, *others = [each if each is None or each.stride(-1) == 1 else each.contiguous() for each in read]
    at = Places(*others, *where[7:])  # type: ignore[arg-type, call-arg]
    is_table, (angles, turned) = at.slot_mapping is None, (1, 0) if at.cos is None else at.cos.shape
    # For absent tensors any pointer will do, because the kernel's constants make it ignore them.
    some: Any = at.seq_lens if is_table else at.slot_mapping
    dtype = STORED.get(str(k_pages.dtype).removeprefix("torch."))
    if dtype == "float8_e4m3fn":  # the kernel writes bytes
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    by = None if scales[0] is None else "token" if scales[0].dim() == 3 else "page"
    rest = (*others, *scales, grown)
    tensors = (k, v, k_pages, v_pages, *[some if each is None else each for each in rest])
    sizes, table, lengths = (*k.shape, v.shape[2], k_pages.shape[1]), tensors[4], tensors[5]
    angle_strides = (0, 0) if at.cos is None or at.sin is None else (at.cos.stride(0), at.sin.stride(0))
    k_scale_strides, v_scale_strides = ((0, 0, 0) if each is None else _scale_strides(each) for each in scales)
    numbers = (
        k_pages.shape[0],
        table.shape[-1] if is_table else 0,
        len(lengths),
        angles,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride()[:3],
        table.stride(0),
        *angle_strides,
        *k_scale_strides,
        *v_scale_strides,
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
            **kernels.constants(dtype, by),
            # One warp finds the largest magnitude of a quantised row without waiting for another. Fusing would round
            # otherwise than JAX, see attn_core.paged.rotary.
            **{"num_warps": 1 if widest <= 64 or dtype else 2, "enable_fp_fusion": False},
        }
        return (tokens, heads, 1), numbers, constants  # a program for each head of each token

    # Tests run the kernel on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if k.is_cuda else -1
    key = ("append", tuple([each.dtype for each in tensors]), dtype, by, added, sizes, numbers, flags, current)
    direct = launch(kernels.append, key, tensors, describe)
    copied = [mine is not None and mine.data_ptr() != own.data_ptr() for mine, own in zip(read, (k, v, *others))]
    return None if any(copied) else direct


def _scale_strides(scales: Tensor) -> tuple[int, int, int]:
    """Returns the strides of scales by page, slot and head. All slots of a page share a scale by page."""
    return (scales.stride(0), 0, scales.stride(1)) if scales.dim() == 2 else scales.stride()  # type: ignore[return-value]


# FRAGMENT, because dispatch.ops defines the namespace.
_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    # The marks (a!) to (d!) tell compilers that the op writes the pools and their scales, so they keep its order among
    # the reads. Scales by page are only read.
    "append_kv(Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor k, Tensor v, "
    f"{', '.join(f'Tensor? {name}' for name in Places._fields[:-1])}, bool interleaved, "
    "Tensor(c!)? k_scales, Tensor(d!)? v_scales) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)

_library.impl("append_kv", _append_op, "CompositeExplicitAutograd")
# No results: the op only writes to its arguments.
torch.library.register_fake("attn::append_kv", lambda *_: None, lib=_library)
