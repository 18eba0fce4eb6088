"""The Triton kernels of a paged call as a program that XLA launches without Python."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.in_order import merge as merge_in_order
from attn_core.backends.shared.in_order.order import How, Tiles
from attn_core.backends.shared.programs import triton_programs
from attn_core.backends.shared.programs.kernel_programs import SCRATCH, Buffer, KernelProgram
from attn_core.backends.triton_splitkv import launches, ordered_call
from attn_core.call.spec import AttentionSpec
from attn_core.paged.arguments import one_query_each

SINKS_DTYPE = "float32"
ORDERED_READS = ("q", "k", "v", "block_table", "seq_lens", "cu_seqlens_q", "sinks", "alibi_slopes", "kv_starts")
"""What ``attend_in_order`` reads; the order is that of ``attend``, too."""


def program(
    spec: AttentionSpec, settings: dict[str, Any], tiles: Tiles, count: int, way: How | None = None
) -> KernelProgram:
    """Returns the program of a call.

    Args:
        settings, tiles, count: the numbers of the kernel, its tiles, and into how many parts each sequence is split.
        way: the launches of a call with ``invariant``, in place of tiles and count.
    """
    from attn_core.backends.shared.in_order import merge_kernel
    from attn_core.backends.triton_splitkv import kernels, ordered_kernels

    if way is not None:
        count = way.shares
    buffers = {"q": Buffer("q", (spec.q_len, spec.num_heads, spec.head_dim), spec.dtype), **_operands(spec)}
    buffers["out"] = Buffer("out", spec.out_shape, spec.dtype)
    buffers["lse"] = Buffer("lse", spec.lse_shape, "float32")
    if count > 1:
        buffers["parts"] = Buffer(SCRATCH, (count, *spec.out_shape), "float32")
        buffers["part_lse"] = Buffer(SCRATCH, (count, *spec.lse_shape), "float32")
    place = {name: number for number, name in enumerate(buffers)}
    every = tuple(buffers.values())
    # The kernel gets another pointer for an operand that the call lacks, and does not read it.
    stand_ins = {"cu_seqlens_q": "seq_lens", "sinks": "q", "key_ranges": "q"}
    stand_ins |= {"alibi_slopes": "q", "kv_starts": "seq_lens", "k_scales": "q", "v_scales": "q"}
    names = ("q", "k", "v", "block_table", "seq_lens", *stand_ins)
    if way is not None:
        names = tuple(name for name in names if name in ORDERED_READS)
    reads = [name if name in buffers else stand_ins[name] for name in names]
    writes = ["parts", "part_lse"] if count > 1 else ["out", "lse"]

    def step(kernel: Any, read: list[str], written: list[str], describe: Any) -> Any:
        tensors = [_like(buffers[name]) for name in (*read, *written)]
        at = tuple(place[name] for name in read), tuple(place[name] for name in written)
        return triton_programs.step(kernel, *at, tuple([tensor.dtype for tensor in tensors]), describe(tensors))

    if way is None:
        attend = kernels.attend, lambda t: launches.attend(spec, tuple(t), settings, tiles, count)
        merge = kernels.merge, lambda t: launches.merge(spec, tuple(t), tiles, count)
    else:
        attend = ordered_kernels.attend_in_order, lambda t: ordered_call.attend(spec, tuple(t), settings, way)
        merge = merge_kernel.merge_in_order, lambda t: merge_in_order.describe(spec, tuple(t), count)
    steps = [step(attend[0], reads, writes, attend[1])]
    if count > 1:
        steps.append(step(merge[0], [*writes, reads[6]], ["out", "lse"], merge[1]))
    return KernelProgram(every, tuple(steps))


def _operands(spec: AttentionSpec) -> dict[str, Buffer]:
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
        shapes["sinks"] = (spec.num_heads,), SINKS_DTYPE
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


def _like(buffer: Buffer) -> Any:
    """Returns a tensor without memory that has a buffer's strides."""
    import torch

    return torch.empty(buffer.shape, dtype=getattr(torch, buffer.dtype), device="meta")
