"""Our own Triton kernel for keys and values in pages: decoding and chunked prefill, the keys of a sequence split.

Limits: bfloat16 and float16, head_dim and value_dim powers of two from 16 to 256 (head_dim from 32 on for float8 and
int8 pages, from 64 on for int4), forward only, paged calls only; page sizes from 1 on. The kernels (``kernels.py``)
clamp table entries, so they never read outside the pool, and never read a key past the end of its sequence. The number
of splits depends on shapes only, so equal calls give equal bits. A NaN in a key or value of a sequence may reach
queries of the same sequence that do not see it, but no other sequence. Calls with ``invariant`` have a kernel of their
own (``attend_in_order``) for heads of up to 128 channels and pages that are not quantised.
Upstream: triton 3.6 to 3.9, as torch brings it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache, lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core.backends.contract import Backend, Buffers, Pages, Program
from attn_core.backends.shared import kernel_programs
from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import PROVEN, How, Tiles, blocks, grid_of, how, settings_of
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.kernel_programs import SCRATCH, Buffer, KernelProgram, operands_in_float32
from attn_core.backends.shared.triton import Description, Direct, launch, multiprocessors, numbers_of
from attn_core.backends.support import Build, Support, compute_capability
from attn_core.backends.triton_splitkv import launches
from attn_core.backends.triton_splitkv.launches import Launches, rows_of, splits, tiles
from attn_core.call.masks import band
from attn_core.call.spec import BITS, AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.paged.arguments import one_query_each
from attn_core.paged.quantised import KINDS

if TYPE_CHECKING:
    from torch import Tensor

PROVEN_WIDTH = 128
"""The widest heads whose bits are the same in all pages. With heads of 256, on an H200 on 2026-12-01, a chunk had other
bits in pages of one token than in pages of 16. We do not know why: their code for sm90 has the same products."""

FORWARD = Support(
    kernel="the Triton split-KV kernel",
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    key_ranges=True,
    softcap=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    paged=True,
    paged_alibi=True,
    paged_starts=True,
    page_dtypes=tuple(BITS),
    invariant=("batch", "prefix"),
)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses widths that are no power of two, grids that are too large, calls without pages, and fp8 before sm89."""
    reasons = []
    if spec.paged is None:
        reasons.append(f"keys and values not in pages: {FORWARD.kernel} reads only pages")
    dtype = spec.paged.dtype if spec.paged else None
    # A product needs 16 channels. Keys are read in words of two bytes, and each of a word's numbers is in a product of
    # its own: two of 8 bits, four of int4. Of values, the two int4 numbers of a byte are.
    fewest_of_keys, fewest_of_values = {None: (16, 16), "int4": (64, 32)}.get(dtype, (32, 16))
    widths = (("head_dim", spec.head_dim, fewest_of_keys), ("value_dim", spec.value_dim, fewest_of_values))
    for name, dim, fewest in widths:
        if dim < fewest or dim & (dim - 1):
            where = f" for pages in {dtype}" if dtype else ""
            reasons.append(f"{name}={dim}: {FORWARD.kernel} takes powers of two from {fewest} on{where}")
    if dtype == "float8_e4m3fn" and 0 < compute_capability(device) < 89:  # Triton compiles none for older GPUs
        reasons.append(f"pages in {dtype}: {FORWARD.kernel} reads them from sm89 on, not on {device}")
    if spec.max_len_q and (rows := -(-spec.max_len_q * spec.group_size // rows_of(spec))) >= GRID_LIMIT:
        most = GRID_LIMIT - 1  # the last block clears the tokens behind the last sequence
        reasons.append(f"max_len_q={spec.max_len_q}: {FORWARD.kernel} launches at most {most} blocks, not {rows}")
    return (*reasons, *_invariant_refusals(spec, device))


def _invariant_refusals(spec: AttentionSpec, device: str) -> list[str]:
    """Returns why a call with ``invariant`` is not known to have the same bits in every chunk and batch."""
    if spec.invariant is None:
        return []
    paged, widest = spec.paged, max(spec.head_dim, spec.value_dim)
    lacks = {
        f"device {device}": device not in PROVEN,
        f"head_dim={widest}": widest > PROVEN_WIDTH,
        "key_ranges": spec.key_ranges_shape is not None,
        f"pages in {paged.dtype if paged else None}": paged is not None and paged.dtype is not None,
    }
    return [f"{what} with invariant={spec.invariant!r}: {FORWARD.kernel} has none" for what in lacks if lacks[what]]


def probe() -> str:
    """Imports the kernels and returns Triton's version."""
    import triton

    from attn_core.backends.triton_splitkv import kernels  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's scalar arguments."""
    dtype = spec.paged.dtype if spec.paged else None
    return {
        **numbers_of(spec),
        "ONE_QUERY": one_query_each(spec),
        "RANGES": 0 if spec.key_ranges_shape is None else spec.key_ranges_shape[3],
        "LEFT_OPEN": band(spec).left is None,
        "FUSED": _scales_late(spec),
        "ALIBI": spec.alibi_shape is not None,
        "STARTS": spec.paged is not None and spec.paged.starts,
        "KIND": KINDS[dtype],
        **({} if spec.invariant is None else settings_of(spec)),
    }


def _scales_late(spec: AttentionSpec) -> bool:
    """Returns whether the kernel scales products while it subtracts their maximum, which saves an instruction.

    A negative scale would turn the maximum into the minimum. Queries of quantised pages take its sign.
    """
    positive = KINDS[spec.paged.dtype if spec.paged else None] != 0 or (spec.scale or 1.0) >= 0
    return positive and band(spec).left is None and spec.softcap is None and spec.alibi_shape is None


@lru_cache(maxsize=4096)
def _settings(spec: AttentionSpec, device: int) -> tuple[dict[str, Any], Tiles, int]:
    return lower(spec), tiles(spec), splits(spec, multiprocessors(device))


@cache
def _kernels() -> ModuleType:
    from attn_core.backends.triton_splitkv import kernels

    return kernels


def forward(spec: AttentionSpec, inputs: PagedInputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    return _forward(spec, inputs, into)[:2]


def paged_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """See ``Backend.paged_shortcut_of``."""
    return launches.repeated(spec, partial(_forward, spec))


def _forward(
    spec: AttentionSpec, inputs: PagedInputs, into: Buffers | None = None
) -> tuple[Tensor, Tensor, Launches | None]:
    """Returns (out, lse), and the launches if they fit other tensors of the same strides."""
    kernels, device = _kernels(), inputs.q.get_device()
    settings, tiles, count = _settings(spec, device)
    way = None if spec.invariant is None else how(spec, multiprocessors(device))
    count = count if way is None else way.shares
    read, copied = launches.operands_of(inputs)
    q, sinks = read.q, read.sinks
    scales = (q, q) if inputs.k_scales is None else (inputs.k_scales, inputs.v_scales)
    out, lse, parts, part_lse = _buffers(spec, q, into, count if count > 1 else 0)
    results, merged = (out.stride(), lse.stride(), sinks.dtype), (parts, part_lse, sinks, out, lse)
    strides = [each.stride() for each in (*read[:3], *scales)]
    layout = (*strides, read.table.stride(0), *results, inputs.cu_seqlens_q is None)
    merge = None
    operands = (*read, *scales, parts, part_lse)
    if way is None:
        key = ("attend", spec, count, layout)
        attend = launch(kernels.attend, key, operands, lambda: launches.attend(spec, operands, settings, tiles, count))
        if count > 1:
            key = ("merge", spec, count, results)
            merge = launch(kernels.merge, key, merged, lambda: launches.merge(spec, merged, count))
    else:
        attend = _attend_in_order(spec, _ordered_operands(*operands), settings, way, layout)
        if count > 1:
            merge = order.launch_merge(spec, merged, count)
    # A copied operand has other strides than the caller's tensor.
    if copied or attend is None or (count > 1 and merge is None):
        return out, lse, None
    return out, lse, Launches(count, attend, merge)


def _buffers(spec: AttentionSpec, q: Tensor, into: Buffers | None, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns out and lse, the caller's if there are any; and so many float32 partial results, which a second kernel
    merges, or out and lse again for none."""
    import torch

    out_shape, lse_shape = spec.out_shape, spec.lse_shape
    out, lse = into or (None, None)
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    if not count:
        return out, lse, out, lse
    parts, part_lse = (torch.empty((count, *s), dtype=torch.float32, device=q.device) for s in (out_shape, lse_shape))
    return out, lse, parts, part_lse


# Calls with ``invariant``: one order of sums for every batch, chunk and page, by ``kernels.attend_in_order``.


def _describe_in_order(
    spec: AttentionSpec, operands: tuple[Tensor, ...], settings: dict[str, Any], way: How
) -> Description:
    """Returns the grid, the numbers and the constants of ``attend_in_order``.

    Args:
        operands: the kernel's tensors. settings: the scalar arguments of ``kernels.attend``.
    """
    q, k, v, table, *_, out, lse = operands
    paged, tiles = spec.paged, way.tiles
    assert paged is not None
    # The kernel indexes partial results by share first.
    out_strides = out.stride() if way.shares else (0, *out.stride())
    lse_strides = lse.stride() if way.shares else (0, *lse.stride())
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        paged.num_pages,
        paged.width,
        settings["left"],
        settings["right"],
        *q.stride()[:2],
        *k.stride()[:3],
        *v.stride()[:3],
        table.stride(0),
        *out_strides[:3],
        *lse_strides[:2],
        spec.num_heads if len(spec.alibi_shape or ()) == 2 else 0,
    )
    constants = {
        **{"KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size, "PAGE": paged.page_size},
        "NEAR": launches.are_near((k, v)),
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{name: settings[name] for name in ("ONE_QUERY", "SOFTCAP", "SINKS", "LEFT_OPEN", "ALIBI", "STARTS")},
        **{"PARTIAL": way.shares > 0, "ONE_SHARE": way.one_share, "SHARE": way.share},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages},
        "enable_fp_fusion": False,
    }
    grid = grid_of(spec, settings["ONE_QUERY"], way.shares, blocks(spec, tiles))
    return grid, numbers, constants


def _attend_in_order(
    spec: AttentionSpec, operands: tuple[Tensor, ...], settings: dict[str, Any], way: How, layout: Hashable
) -> Direct | None:
    """Launches ``kernels.attend_in_order`` on ``_ordered_operands``.

    Returns a launch that takes the addresses of all operands of ``kernels.attend``, as that kernel's own launch does.
    """
    key = ("attend_in_order", spec, way, layout)
    direct = launch(
        _kernels().attend_in_order, key, operands, lambda: _describe_in_order(spec, operands, settings, way)
    )
    if direct is None:
        return None
    return lambda *addresses: direct(*_ordered_operands(*addresses))


Operand = TypeVar("Operand")


def _ordered_operands(
    q: Operand,
    k: Operand,
    v: Operand,
    table: Operand,
    lengths: Operand,
    offsets: Operand,
    sinks: Operand,
    key_ranges: Operand,
    slopes: Operand,
    starts: Operand,
    k_scales: Operand,
    v_scales: Operand,
    out: Operand,
    lse: Operand,
) -> tuple[Operand, ...]:
    """Returns those operands of ``kernels.attend``, or their addresses, that ``attend_in_order`` takes."""
    return q, k, v, table, lengths, offsets, sinks, slopes, starts, out, lse


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    return () if device == "sm90" else (f"{device}: proven on sm90 only",)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False) -> KernelProgram:
    """Returns the kernels of a call on the current GPU, and the buffers between them, as ``flash4`` does.

    Raises Unrecordable if this jaxlib or Triton differs from those that ``shared.kernel_programs`` knows.
    """
    import torch

    device = torch.cuda.current_device()
    way = None if spec.invariant is None else how(spec, multiprocessors(device))
    settings, tiles, count = _settings(spec, device)
    return program_of(spec, settings, tiles, count, way)


ORDERED_READS = ("q", "k", "v", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "alibi_slopes", "kv_starts")
"""What ``attend_in_order`` reads; the order is that of ``attend``, too."""


def program_of(
    spec: AttentionSpec, settings: dict[str, Any], tiles: Tiles, count: int, way: How | None = None
) -> KernelProgram:
    """Returns the program of a call.

    Args:
        settings, tiles, count: the numbers of the kernel, its tiles, and into how many parts each sequence is split.
        way: the launches of a call with ``invariant``, in place of tiles and count.
    """
    from attn_core.backends.triton_splitkv import kernels

    if way is not None:
        count = way.shares
    buffers = {"q": Buffer("q", (spec.q_len, spec.num_heads, spec.head_dim), spec.dtype), **_operand_buffers(spec)}
    buffers["out"] = Buffer("out", spec.out_shape, spec.dtype)
    buffers["lse"] = Buffer("lse", spec.lse_shape, "float32")
    if count > 1:
        buffers["parts"] = Buffer(SCRATCH, (count, *spec.out_shape), "float32")
        buffers["part_lse"] = Buffer(SCRATCH, (count, *spec.lse_shape), "float32")
    # The kernel gets another pointer for an operand that the call lacks, and does not read it.
    stand_ins = {"cu_seqlens_q": "seq_lens", "sinks": "q", "key_ranges": "q"}
    stand_ins |= {"alibi_slopes": "q", "kv_starts": "seq_lens", "k_scales": "q", "v_scales": "q"}
    names = ("q", "k", "v", "block_table", "seq_lens", *stand_ins)
    if way is not None:
        names = tuple(name for name in names if name in ORDERED_READS)
    reads = tuple(name if name in buffers else stand_ins[name] for name in names)
    writes = ("parts", "part_lse") if count > 1 else ("out", "lse")
    if way is None:
        attend = kernels.attend, lambda t: launches.attend(spec, t, settings, tiles, count)
        merge = kernels.merge, lambda t: launches.merge(spec, t, count)
    else:
        attend = kernels.attend_in_order, lambda t: _describe_in_order(spec, t, settings, way)
        merge = order.merge_kernel(), lambda t: order.describe_merge(spec, t, count)
    built = kernel_programs.Program(buffers)
    built.add(attend[0], reads, writes, attend[1])
    if count > 1:
        sinks = reads[names.index("sinks")]  # of the call, or what stands for them
        built.add(merge[0], (*writes, sinks), ("out", "lse"), merge[1])
    return built.built()


def _operand_buffers(spec: AttentionSpec) -> dict[str, Buffer]:
    """Returns the arrays of a paged call beside q, by name: shapes and dtypes, as its program declares them."""
    paged, documents = spec.paged, spec.documents or 0
    assert paged is not None
    pool = paged.num_pages, paged.page_size, spec.num_kv_heads
    stored, half = (paged.dtype or spec.dtype), 1
    if paged.dtype == "int4":
        stored, half = "uint8", 2
    shapes: dict[str, tuple[Any, str]] = {
        "k": ((*pool, spec.head_dim // half), stored),
        "v": ((*pool, spec.value_dim // half), stored),
        "block_table": ((documents, paged.width), "int32"),
        "seq_lens": ((documents,), "int32"),
    }
    if not one_query_each(spec):
        shapes["cu_seqlens_q"] = (documents + 1,), "int32"
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,), "float32"
    if spec.key_ranges_shape is not None:
        shapes["key_ranges"] = spec.key_ranges_shape, "int32"
    if spec.alibi_shape is not None:
        shapes["alibi_slopes"] = spec.alibi_shape, "float32"
    if paged.starts:
        shapes["kv_starts"] = (documents,), "int32"
    if paged.dtype is not None:
        by = pool[::2] if paged.scales == "page" else pool
        shapes |= {"k_scales": (by, "float32"), "v_scales": (by, "float32")}
    return {name: Buffer(name, tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}


BACKEND = Backend(
    name="triton_splitkv",
    framework="torch",
    requires="triton>=3.6",
    forward_claims=FORWARD,
    backward_claims=None,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=None,
    pages=Pages(shortcut=paged_shortcut, alone=True, first_for_few_queries=True),
    program=Program(make=program, refuses=program_refuses, operands=operands_in_float32),
    writes_into=("forward",),
    # With few queries it comes first; prompts run on the kernels of packages.
    paged_preference={"cuda": 40},
    also_called={"triton": 10},
    splits_keys=True,
)
