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

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from attn_core.backends.shared.in_order import merge, order
from attn_core.backends.shared.in_order.order import how
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.programs import triton_programs
from attn_core.backends.shared.programs.kernel_programs import SCRATCH, Buffer, KernelProgram, KernelStep
from attn_core.backends.shared.programs.triton import Description, launch, with_dense_channels
from attn_core.backends.support import Build, Support
from attn_core.backends.triton_ordered import gradients, launches
from attn_core.call.counters import operand_copied
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "torch"
REQUIRES = "triton>=3.6"

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
WRITES_INTO = True

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
        programs = max(programs, spec.batch * spec.num_heads * -(-spec.q_len // gradients.SUM_ROWS))
    if programs > MOST_PROGRAMS:
        sizes = f"{number} rows of {queries} queries and {spec.num_heads} heads"
        reasons.append(f"{sizes}: {FORWARD.kernel} launches at most {MOST_PROGRAMS} programs, not {programs}")
    blocks = {f"{queries} queries of a row": order.blocks(spec, order.ordered_tiles(spec))}
    if spec.needs_backward:
        blocks[f"{keys} keys of a row"] = -(-keys // gradients.tiles(spec)[0].keys)
    for size, count in blocks.items():
        if count > GRID_LIMIT:
            reasons.append(f"{size}: {FORWARD.kernel} launches at most {GRID_LIMIT} blocks, not {count}")
    return tuple(reasons)


def probe() -> str:
    """Imports the kernels and returns Triton's version."""
    import triton

    from attn_core.backends.triton_ordered import kernels  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernels' scalar arguments, and the sizes that keep the order of sums."""
    return {**launches.settings_of(spec), **order.settings_of(spec)}


@lru_cache(maxsize=4096)
def _settings(spec: AttentionSpec) -> dict[str, Any]:
    return launches.settings_of(spec)


@cache
def _kernels() -> Any:
    from attn_core.backends.triton_ordered import kernels

    return kernels


@cache
def _multiprocessors(device: int) -> int:
    import torch

    # A CPU tensor has device -1: tests run the kernels in Triton's interpreter.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device >= 0 else 1


def _current(tensor: Any) -> int:
    """Returns the current device, because Triton launches there; -1 for a CPU tensor."""
    import torch

    return torch.cuda.current_device() if tensor.is_cuda else -1


def _aligned(dout: Any) -> Any:
    """Returns a gradient, or a contiguous copy if its rows do not all begin at multiples of 16 elements.

    Triton reads such rows with other instructions, and then adds their channels in another order.
    """
    if dout.data_ptr() % 16 == 0 and not any(step % 16 for step in dout.stride()[:-1]):
        return dout
    operand_copied()
    return dout.contiguous()


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    """Returns what all kernels read: q, k, v, offsets, sinks and slopes; q stands for what is absent."""
    q = with_dense_channels(inputs.q)
    offsets = [q if each is None else each.contiguous() for each in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
    sinks = q if inputs.sinks is None else inputs.sinks.contiguous()
    slopes = q if inputs.alibi_slopes is None else inputs.alibi_slopes.float().contiguous()
    return (q, with_dense_channels(inputs.k), with_dense_channels(inputs.v), *offsets, sinks, slopes)


def _layout(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([(tensor.stride(), tensor.dtype) for tensor in tensors])


def _buffer(into: Any, shape: tuple[int, ...], kind: Any, device: Any) -> Any:
    """Returns a contiguous tensor for a result: the caller's if it is contiguous."""
    import torch

    if into is not None and into.is_contiguous():
        return into
    return torch.empty(shape, dtype=kind, device=device)


def forward(spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    import torch

    operands, settings, into = _operands(inputs), _settings(spec), into or (None, None)
    q, sinks = operands[0], operands[5]
    way, current = how(spec, _multiprocessors(q.get_device())), _current(q)
    out = _buffer(into[0], spec.out_shape, q.dtype, q.device)
    lse = _buffer(into[1], spec.lse_shape, torch.float32, q.device)
    parts, part_lse = out, lse
    if way.shares:
        tokens = spec.batch * spec.q_len
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
        part_lse = torch.empty((way.shares, spec.num_heads, tokens), dtype=torch.float32, device=q.device)
    tensors = (*operands, parts, part_lse)
    key = ("ordered attend", spec, way, _layout(operands), current)
    launch(_kernels().attend, key, tensors, lambda: launches.attend(spec, tensors, settings, way))
    if way.shares:
        rows = out if spec.packed else out.flatten(0, 1)
        merge.launch_merge(spec, (parts, part_lse, sinks, rows, lse), way.shares, current)
    return out, lse


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None
) -> Gradients:
    """See ``Backend.backward``."""
    import torch

    settings = _settings(spec)
    kernels = _kernels()
    q, k, v, *offsets, sinks, slopes = _operands(inputs)
    current = _current(q)
    out, dout, lse = with_dense_channels(out), _aligned(with_dense_channels(dout)), lse.contiguous()
    # The log-sum-exp stands for an absent dlse, and the kernel does not read it.
    incoming = lse if dlse is None else dlse.contiguous()
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    sums = (out, dout, lse, incoming, shift, delta)
    seen: tuple[Any, ...] = (spec, dlse is None, _layout(sums), current)
    launch(kernels.row_sums, ("ordered sums", *seen), sums, lambda: gradients.row_sums(spec, sums, dlse is not None))

    dq, dk, dv = (
        _buffer(part, tuple(tensor.shape), tensor.dtype, q.device)
        for part, tensor in zip(into or (None, None, None), inputs[:3])
    )
    read = (q, k, v, dout, shift, delta, *offsets, slopes)
    tiles = gradients.tiles(spec)
    place = (spec, tiles, _layout(read), current)
    keys, queries = (*read, dk, dv), (*read, dq)
    launch(kernels.of_keys, ("ordered dk, dv", *place), keys, lambda: gradients.of_keys(spec, keys, settings, tiles[0]))
    launch(
        kernels.of_queries,
        ("ordered dq", *place),
        queries,
        lambda: gradients.of_queries(spec, queries, settings, tiles[1]),
    )
    if not spec.sinks:
        return Gradients(dq, dk, dv)
    dsinks = torch.empty(spec.num_heads, dtype=torch.float32, device=q.device)
    about = (sinks, shift, delta, dsinks)
    launch(
        kernels.sink_sums,
        ("ordered sinks", spec, sinks.dtype, current),
        about,
        lambda: gradients.sink_sums(spec, about),
    )
    return Gradients(dq, dk, dv, dsinks=dsinks.to(inputs.sinks.dtype))


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    return () if device in order.PROVEN else (f"{device}: proven on sm90 only",)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False) -> KernelProgram:
    """Returns the kernels of a call on the current GPU, and the buffers between them, as ``flash4`` does.

    Raises Unrecordable if this jaxlib or Triton differs from those that ``shared.programs.triton_programs`` knows.
    """
    import torch

    if direction == "backward":
        return _backward_program(spec, with_dlse)
    return _forward_program(spec, _multiprocessors(torch.cuda.current_device()))


READS = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "sinks", "alibi_slopes")
"""What the forward reads."""


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


def _forward_program(spec: AttentionSpec, multiprocessors: int) -> KernelProgram:
    """Returns the program of a forward on a GPU of so many multiprocessors."""
    way, buffers, settings = how(spec, multiprocessors), _input_buffers(spec), _settings(spec)
    buffers |= {"out": Buffer("out", spec.out_shape, spec.dtype), "lse": Buffer("lse", spec.lse_shape, "float32")}
    tokens, results = spec.batch * spec.q_len, ("out", "lse")
    if way.shares:
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        buffers["parts"] = Buffer(SCRATCH, size, "float32")
        buffers["part_lse"] = Buffer(SCRATCH, (way.shares, spec.num_heads, tokens), "float32")
        results = ("parts", "part_lse")
    program = _Program(buffers)
    program.add(_kernels().attend, READS, results, lambda like: launches.attend(spec, like, settings, way))
    if way.shares:

        def describe(like: tuple[Any, ...]) -> Description:
            *read, out, lse = like
            return merge.describe(spec, (*read, out if spec.packed else out.flatten(0, 1), lse), way.shares)

        program.add(merge.kernel(), (*results, "sinks"), ("out", "lse"), describe)
    return program.built()


def _backward_program(spec: AttentionSpec, with_dlse: bool) -> KernelProgram:
    """Returns the program of a backward."""
    buffers, kernels, tiles, settings = _input_buffers(spec), _kernels(), gradients.tiles(spec), _settings(spec)
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


def _input_buffers(spec: AttentionSpec) -> dict[str, Buffer]:
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


def program_operands(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands of a program that are not the call's own arrays, by name: sinks and slopes in float32."""
    return {name: arrays[name].astype("float32") for name in ("sinks", "alibi_slopes") if name in arrays}
