"""The Triton kernels of a call as a program that XLA launches without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.backends.shared.in_order import merge
from attn_core.backends.shared.in_order.order import how
from attn_core.backends.shared.programs import triton_programs
from attn_core.backends.shared.programs.kernel_programs import SCRATCH, Buffer, KernelProgram, KernelStep
from attn_core.backends.shared.programs.triton import Description
from attn_core.backends.triton_ordered import calls, gradients, launches
from attn_core.call.spec import AttentionSpec

READS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes")
"""What the forward reads."""


Describe = Callable[[tuple[Any, ...]], Description]


class _Program:
    """The buffers of a program by name, and its steps so far. q stands for buffers that a call does not have."""

    def __init__(self, buffers: dict[str, Buffer]) -> None:
        self.buffers = buffers
        self.steps: list[KernelStep] = []

    def add(
        self, kernel: Any, reads: tuple[str, ...], writes: tuple[str, ...], how: Callable[..., Description]
    ) -> None:
        """Adds a kernel; ``how(tensors)`` describes its launch on tensors without memory."""
        import torch

        place = {name: number for number, name in enumerate(self.buffers)}
        reads = tuple(name if name in self.buffers else "q" for name in reads)
        chosen = [self.buffers[name] for name in (*reads, *writes)]
        like = tuple(torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta") for each in chosen)
        at = tuple(place[name] for name in reads), tuple(place[name] for name in writes)
        self.steps.append(triton_programs.step(kernel, *at, tuple([each.dtype for each in like]), how(like)))

    def built(self) -> KernelProgram:
        return KernelProgram(tuple(self.buffers.values()), tuple(self.steps))


def forward(spec: AttentionSpec, settings: dict[str, Any], multiprocessors: int) -> KernelProgram:
    """Returns the program of a forward on a GPU of so many multiprocessors. settings: ``launches.settings_of``."""
    way, buffers = how(spec, multiprocessors), _inputs(spec)
    buffers |= {"out": Buffer("out", spec.out_shape, spec.dtype), "lse": Buffer("lse", spec.lse_shape, "float32")}
    tokens, results = spec.batch * spec.q_len, ("out", "lse")
    if way.shares:
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        buffers["parts"] = Buffer(SCRATCH, size, "float32")
        buffers["part_lse"] = Buffer(SCRATCH, (way.shares, spec.num_heads, tokens), "float32")
        results = ("parts", "part_lse")
    program = _Program(buffers)
    program.add(calls.kernels().attend, READS, results, lambda like: launches.attend(spec, like, settings, way))
    if way.shares:

        def describe(like: tuple[Any, ...]) -> Description:
            *read, out, lse = like
            return merge.describe(spec, (*read, out if spec.packed else out.flatten(0, 1), lse), way.shares)

        program.add(merge.kernel(), (*results, "sinks"), ("out", "lse"), describe)
    return program.built()


def backward(spec: AttentionSpec, settings: dict[str, Any], with_dlse: bool) -> KernelProgram:
    """Returns the program of a backward. settings: from ``launches.settings_of``."""
    buffers, kernels, tiles = _inputs(spec), calls.kernels(), gradients.tiles(spec)
    buffers |= {"out": Buffer("out", spec.out_shape, spec.dtype), "lse": Buffer("lse", spec.lse_shape, "float32")}
    buffers["dout"] = Buffer("dout", spec.out_shape, spec.dtype)
    if with_dlse:
        buffers["dlse"] = Buffer("dlse", spec.lse_shape, "float32")
    for name in ("shift", "delta"):
        buffers[name] = Buffer(SCRATCH, spec.lse_shape, "float32")
    for name in "qkv":
        buffers[f"d{name}"] = buffers[name]._replace(name=f"d{name}")
    if spec.sinks:
        buffers["dsinks"] = Buffer("dsinks", (spec.num_heads,), "float32")
    program = _Program(buffers)
    sums = ("out", "dout", "lse", "dlse" if with_dlse else "lse")
    program.add(kernels.row_sums, sums, ("shift", "delta"), lambda like: gradients.row_sums(spec, like, with_dlse))
    read = ("q", "k", "v", "dout", "shift", "delta", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes")
    of_keys, of_queries = tiles
    program.add(kernels.of_keys, read, ("dk", "dv"), lambda like: gradients.of_keys(spec, like, settings, of_keys))
    program.add(kernels.of_queries, read, ("dq",), lambda like: gradients.of_queries(spec, like, settings, of_queries))
    if spec.sinks:
        rows = ("sinks", "shift", "delta")
        program.add(kernels.sink_sums, rows, ("dsinks",), lambda like: gradients.sink_sums(spec, like))
    return program.built()


def _inputs(spec: AttentionSpec) -> dict[str, Buffer]:
    rows, offsets = (() if spec.packed else (spec.batch,)), (spec.documents or 0) + 1
    shapes: dict[str, tuple[Any, str]] = {
        "q": ((*rows, spec.q_len, spec.num_heads, spec.head_dim), spec.dtype),
        "k": ((*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim), spec.dtype),
        "v": ((*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim), spec.dtype),
    }
    if spec.packed:
        shapes |= {"cu_seqlens_q": ((offsets,), "int32"), "cu_seqlens_k": ((offsets,), "int32")}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,), "float32"
    if spec.alibi_shape is not None:
        shapes["alibi_slopes"] = spec.alibi_shape, "float32"
    return {name: Buffer(name, tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}
