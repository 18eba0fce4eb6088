"""Our own Triton kernels that add in one order: a token has the same bits in every batch, packing and chunk.

Keys and values in pages have the same order in ``triton_splitkv``, so a token decoded from pages has these bits, too.

Limits: sm90, bfloat16 and float16, head_dim and value_dim powers of two from 16 to 256; no mask, bias, key ranges or
dropout. The order of sums of out and lse is that of ``shared.in_order``. Gradients are the two passes of
FlashAttention-2 (Dao 2023, arXiv:2307.08691), one over tiles of keys and one over tiles of queries, without atomics:
tiles begin at multiples of their size, counted from the document's start, and are added in order. A NaN in a key or
value may reach queries of its document that do not see it, but no other document.
Upstream: triton 3.6 to 3.9, as torch brings it.
"""

from __future__ import annotations

from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, Program
from attn_core.backends.shared import first_calls, kernel_programs
from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import How, how
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.kernel_programs import SCRATCH, Buffer, KernelProgram, operands_in_float32
from attn_core.backends.shared.readable import dense_channels, readable
from attn_core.backends.shared.triton import Description, Numbers, launch, multiprocessors, result_buffer
from attn_core.backends.support import Build, Support
from attn_core.backends.triton_ordered import launches
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORWARD = Support(
    kernel="the Triton kernel of one order",
    devices=order.PROVEN,
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    alibi=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    lse_gradient=True,
    invariant=("batch", "prefix"),
)
BACKWARD = FORWARD

MOST_PROGRAMS = 2**31 - 1
"""The most programs along the first axis of a CUDA grid."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses widths that are no power of two, and grids that are too large."""
    reasons = []
    for dim in sorted({spec.head_dim, spec.value_dim}):
        if dim < 16 or dim & (dim - 1):
            reasons.append(f"head_dim={dim}: {FORWARD.kernel} takes powers of two from 16 on")
    number, queries, keys = order.sequences(spec)
    programs = number * spec.num_heads
    if spec.needs_backward:
        programs = max(programs, spec.batch * spec.num_heads * -(-spec.q_len // launches.SUM_ROWS))
    if programs > MOST_PROGRAMS:
        sizes = f"{number} rows of {queries} queries and {spec.num_heads} heads"
        reasons.append(f"{sizes}: {FORWARD.kernel} launches at most {MOST_PROGRAMS} programs, not {programs}")
    blocks = {f"{queries} queries of a row": order.blocks(spec, order.ordered_tiles(spec))}
    if spec.needs_backward:
        blocks[f"{keys} keys of a row"] = -(-keys // launches.tiles(spec)[0].keys)
    for size, count in blocks.items():
        if count > GRID_LIMIT:
            reasons.append(f"{size}: {FORWARD.kernel} launches at most {GRID_LIMIT} blocks, not {count}")
    return tuple(reasons)


def probe() -> str:
    """Imports the kernels and returns Triton's version."""
    import triton

    from attn_core.backends.triton_ordered import kernels  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> Numbers:
    """Returns the kernels' scalar arguments, and the sizes that keep the order of sums."""
    return {**launches.settings_of(spec), **order.settings_of(spec)}


@lru_cache(maxsize=4096)
def _settings(spec: AttentionSpec) -> Numbers:
    return launches.settings_of(spec)


@cache
def _kernels() -> ModuleType:
    from attn_core.backends.triton_ordered import kernels

    return kernels


def _in_sixteens(dout: Tensor) -> bool:
    """Returns whether a gradient is contiguous, or all its rows begin at multiples of 16 elements.

    Triton reads other rows with other instructions, and then adds their channels in another order.
    """
    if dout.is_contiguous():
        return True
    *others, channel = dout.stride()
    return dout.data_ptr() % 16 == 0 and channel == 1 and not any(step % 16 for step in others)


def _operands(inputs: Inputs) -> tuple[Tensor, ...]:
    """Returns what all kernels read: q, k, v, offsets, sinks and slopes; q stands for what is absent."""
    q = readable(inputs.q, dense_channels)
    offsets = [q if each is None else each.contiguous() for each in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
    sinks = q if inputs.sinks is None else inputs.sinks.contiguous()
    slopes = q if inputs.alibi_slopes is None else inputs.alibi_slopes.float().contiguous()
    return (q, readable(inputs.k, dense_channels), readable(inputs.v, dense_channels), *offsets, sinks, slopes)


def _layout(tensors: tuple[Tensor, ...]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple([(tensor.stride(), tensor.dtype) for tensor in tensors])


def forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    import torch

    operands, settings, into = _operands(inputs), _settings(spec), into or (None, None)
    q, *_, sinks, _ = operands
    way = how(spec, multiprocessors(q.get_device()))
    out = result_buffer(into[0], spec.out_shape, q.dtype, q.device)
    lse = result_buffer(into[1], spec.lse_shape, torch.float32, q.device)
    parts, part_lse = out, lse  # without shares the first kernel writes the results
    if way.shares:
        tokens = spec.batch * spec.q_len
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
        part_lse = torch.empty((way.shares, spec.num_heads, tokens), dtype=torch.float32, device=q.device)
    tensors = (*operands, parts, part_lse)
    key = ("ordered attend", spec, way, _layout(operands))
    launch(_kernels().attend, key, tensors, lambda: launches.attend(spec, tensors, settings, way))
    if way.shares:
        rows = out if spec.packed else out.flatten(0, 1)
        order.launch_merge(spec, (parts, part_lse, sinks, rows, lse), way.shares)
    return out, lse


def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    into: Gradients | None = None,
) -> Gradients:
    """See ``Backend.backward``."""
    import torch

    settings = _settings(spec)
    kernels = _kernels()
    q, k, v, *offsets, sinks, slopes = _operands(inputs)
    out, dout, lse = readable(out, dense_channels), readable(dout, _in_sixteens), lse.contiguous()
    # The log-sum-exp stands for an absent dlse, and the kernel does not read it.
    incoming = lse if dlse is None else dlse.contiguous()
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    sums = (out, dout, lse, incoming, shift, delta)
    seen: tuple[Any, ...] = (spec, dlse is None, _layout(sums))
    launch(kernels.row_sums, ("ordered sums", *seen), sums, lambda: launches.row_sums(spec, sums, dlse is not None))

    dq, dk, dv = (
        result_buffer(part, tuple(tensor.shape), tensor.dtype, q.device)
        for part, tensor in zip(into or (None, None, None), inputs[:3])
    )
    # Each pass computes the weights again, so that no two programs add to one gradient.
    read = (q, k, v, dout, shift, delta, *offsets, slopes)
    tiles = launches.tiles(spec)
    place = (spec, tiles, _layout(read))
    keys, queries = (*read, dk, dv), (*read, dq)
    launch(kernels.of_keys, ("ordered dk, dv", *place), keys, lambda: launches.of_keys(spec, keys, settings, tiles[0]))
    launch(
        kernels.of_queries,
        ("ordered dq", *place),
        queries,
        lambda: launches.of_queries(spec, queries, settings, tiles[1]),
    )
    if not spec.sinks:
        return Gradients(dq, dk, dv)
    dsinks = torch.empty(spec.num_heads, dtype=torch.float32, device=q.device)
    about = (sinks, shift, delta, dsinks)
    key = ("ordered sinks", spec, sinks.dtype)
    launch(kernels.sink_sums, key, about, lambda: launches.sink_sums(spec, about))
    return Gradients(dq, dk, dv, dsinks=dsinks.to(inputs.sinks.dtype))


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    return () if device in order.PROVEN else (f"{device}: proven on sm90 only",)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False) -> KernelProgram:
    """Returns the kernels of a call on the current GPU, and the buffers between them, as ``flash4`` does.

    Raises Unrecordable if this jaxlib or Triton differs from those that ``shared.kernel_programs`` knows.
    """
    import torch

    if direction == "backward":
        return _backward_program(spec, with_dlse)
    return _forward_program(spec, how(spec, multiprocessors(torch.cuda.current_device())))


READS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes")
"""What the forward reads."""


def _forward_program(spec: AttentionSpec, way: How) -> KernelProgram:
    """Returns the program of a forward with these launches."""
    buffers, settings = _input_buffers(spec), _settings(spec)
    buffers |= {"out": Buffer("out", spec.out_shape, spec.dtype), "lse": Buffer("lse", spec.lse_shape, "float32")}
    tokens, results = spec.batch * spec.q_len, ("out", "lse")
    if way.shares:
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        buffers["parts"] = Buffer(SCRATCH, size, "float32")
        buffers["part_lse"] = Buffer(SCRATCH, (way.shares, spec.num_heads, tokens), "float32")
        results = ("parts", "part_lse")
    program = kernel_programs.Program(buffers)
    program.add(_kernels().attend, READS, results, lambda like: launches.attend(spec, like, settings, way))
    if way.shares:

        def describe(like: tuple[Tensor, ...]) -> Description:
            *read, out, lse = like
            return order.describe_merge(spec, (*read, out if spec.packed else out.flatten(0, 1), lse), way.shares)

        program.add(order.merge_kernel(), (*results, "sinks"), ("out", "lse"), describe)
    return program.built()


def _backward_program(spec: AttentionSpec, with_dlse: bool) -> KernelProgram:
    buffers, kernels, tiles, settings = _input_buffers(spec), _kernels(), launches.tiles(spec), _settings(spec)
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
    program = kernel_programs.Program(buffers)
    sums = ("out", "dout", "lse", "dlse" if with_dlse else "lse")
    program.add(kernels.row_sums, sums, ("shift", "delta"), lambda like: launches.row_sums(spec, like, with_dlse))
    read = ("q", "k", "v", "dout", "shift", "delta", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes")
    of_keys, of_queries = tiles
    program.add(kernels.of_keys, read, ("dk", "dv"), lambda like: launches.of_keys(spec, like, settings, of_keys))
    program.add(kernels.of_queries, read, ("dq",), lambda like: launches.of_queries(spec, like, settings, of_queries))
    if spec.sinks:
        rows = ("sinks", "shift", "delta")
        program.add(kernels.sink_sums, rows, ("dsinks",), lambda like: launches.sink_sums(spec, like))
    return program.built()


def _input_buffers(spec: AttentionSpec) -> dict[str, Buffer]:
    """Returns the arrays that a call has, by name: shapes and dtypes, as its program declares them."""
    offsets = (spec.documents or 0) + 1
    shapes: dict[str, tuple[Any, str]] = {
        name: (shape, spec.dtype) for name, shape in zip("qkv", first_calls.shapes(spec), strict=True)
    }
    if spec.packed:
        shapes |= {"cu_seqlens_q": ((offsets,), "int32"), "cu_seqlens_k": ((offsets,), "int32")}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,), "float32"
    if spec.alibi_shape is not None:
        shapes["alibi_slopes"] = spec.alibi_shape, "float32"
    return {name: Buffer(name, tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}


BACKEND = Backend(
    name="triton_ordered",
    framework="torch",
    requires="triton>=3.6",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    program=Program(make=program, refuses=program_refuses, operands=operands_in_float32),
    writes_into=("forward", "backward"),
    keeps_order_on=("cuda",),
    in_pages="triton_splitkv",
)
