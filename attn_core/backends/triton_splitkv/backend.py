"""Our own Triton kernel for keys and values in pages: decoding and chunked prefill, the keys of a sequence split.

Limits: bfloat16 and float16, head_dim and value_dim powers of two from 16 to 256 (head_dim from 32 on for float8 and
int8 pages, from 64 on for int4), forward only, paged calls only; page sizes from 1 on. The kernels (``kernels.py``)
clamp table entries, so they never read outside the pool, and never read a key past the end of its sequence. The number
of splits depends on shapes only, so equal calls give equal bits. A NaN in a key or value of a sequence may reach
queries of the same sequence that do not see it, but no other sequence. Calls with ``invariant`` have
kernels of their own (``ordered_kernels.py``) for pages that are not quantised.
Upstream: triton 3.6 to 3.9, as torch brings it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from attn_core.backends.shared.device_kinds import compute_capability
from attn_core.backends.shared.in_order.order import Tiles, how, settings_of
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.programs.kernel_programs import KernelProgram
from attn_core.backends.shared.programs.triton import launch
from attn_core.backends.support import Build, Support
from attn_core.backends.triton_splitkv import launches, ordered_call
from attn_core.backends.triton_splitkv.shares import rows_of, splits, tiles
from attn_core.call.masks import band
from attn_core.call.pages import BITS
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, PagedInputs
from attn_core.paged.arguments import one_query_each
from attn_core.paged.quantised.numbers import KINDS

FRAMEWORK = "torch"
REQUIRES = "triton>=3.6"

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
BACKWARD = None
PAGES_ALONE = True
WRITES_INTO = True
WRITES_STRIDED = True
PAGED_SHORTCUT_TAKES_ALL = True


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses widths that are no power of two, grids that are too large, and calls without pages."""
    reasons = []
    if spec.paged is None:
        reasons.append(f"keys and values not in pages: {FORWARD.kernel} reads only pages")
    dtype = spec.paged.dtype if spec.paged else None
    # A product needs 16 channels, and words of two bytes have two or four numbers, each of them a product's own.
    least = {None: (16, 16), "int4": (64, 32)}.get(dtype, (32, 16))
    for name, dim, fewest in zip(("head_dim", "value_dim"), (spec.head_dim, spec.value_dim), least, strict=True):
        if dim < fewest or dim & (dim - 1):
            where = f" for pages in {dtype}" if dtype else ""
            reasons.append(f"{name}={dim}: {FORWARD.kernel} takes powers of two from {fewest} on{where}")
    if dtype == "float8_e4m3fn" and 0 < compute_capability(device) < 89:  # Triton compiles none for older GPUs
        reasons.append(f"pages in {dtype}: {FORWARD.kernel} reads them from sm89 on, not on {device}")
    if spec.max_len_q and (rows := -(-spec.max_len_q * spec.group_size // rows_of(spec))) >= GRID_LIMIT:
        most = GRID_LIMIT - 1  # the last block clears the tokens behind the last sequence
        reasons.append(f"max_len_q={spec.max_len_q}: {FORWARD.kernel} launches at most {most} blocks, not {rows}")
    return (*reasons, *ordered_call.refusals(spec, device, FORWARD.kernel))


def probe() -> str:
    """Imports the kernels and returns Triton's version."""
    import triton

    from attn_core.backends.triton_splitkv import kernels, ordered_kernels  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's scalar arguments. An open side of the window becomes a distance that reaches every key."""
    edge, dtype = band(spec), spec.paged.dtype if spec.paged else None
    # The kernel adds positions to it in int32, so it must stay far below 2**31.
    far = 2**30
    return {
        "scale": spec.scale,
        "softcap": spec.softcap or 1.0,  # unused without SOFTCAP
        "left": far if edge.left is None else edge.left,
        "right": far if edge.right is None else edge.right,
        "ONE_QUERY": one_query_each(spec),
        "SOFTCAP": spec.softcap is not None,
        "SINKS": spec.sinks,
        "RANGES": 0 if spec.key_ranges_shape is None else spec.key_ranges_shape[3],
        "LEFT_OPEN": edge.left is None,
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
    return lower(spec), tiles(spec), splits(spec, _multiprocessors(device))


@cache
def _multiprocessors(device: int) -> int:
    import torch

    # A CPU tensor has device -1: tests run the kernel in Triton's interpreter.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device >= 0 else 1


@lru_cache(maxsize=4096)
def _results(spec: AttentionSpec, device: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Returns the number of splits, and the shapes of out and lse."""
    return _settings(spec, device)[2], spec.out_shape, spec.lse_shape


@cache
def _kernels() -> Any:
    from attn_core.backends.triton_splitkv import kernels

    return kernels


def forward(spec: AttentionSpec, inputs: PagedInputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    if spec.invariant is not None:
        return _in_order(spec, inputs, into)[:2]
    return _forward(spec, inputs, (None, None) if into is None else into)[:2]


def _in_order(spec: AttentionSpec, inputs: PagedInputs, into: Any = None) -> tuple[Any, Any, launches.Launches | None]:
    device = inputs.q.get_device()
    return ordered_call.forward(spec, inputs, into, _settings(spec, device)[0], _multiprocessors(device))


def paged_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Any, Any]]:
    """See ``contract.paged_shortcut``."""
    if spec.invariant is not None:
        return launches.repeated(spec, lambda inputs: _in_order(spec, inputs))
    return launches.repeated(spec, lambda inputs: _forward(spec, inputs, (None, None)))


def _forward(
    spec: AttentionSpec, inputs: PagedInputs, into: tuple[Any, Any]
) -> tuple[Any, Any, launches.Launches | None]:
    """Returns (out, lse), and the launches if they fit other tensors of the same strides."""
    import torch

    kernels, device = _kernels(), inputs.q.get_device()
    count, out_shape, lse_shape = _results(spec, device)
    read, copied = launches.operands_of(inputs)
    q, sinks = read.q, read.sinks
    scales = (q, q) if inputs.k_scales is None else (inputs.k_scales, inputs.v_scales)
    out, lse = into
    if out is None:
        out = torch.empty(out_shape, dtype=q.dtype, device=q.device)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    parts, part_lse = out, lse
    if count > 1:  # float32 partial results, which a second kernel merges
        parts = torch.empty((count, *out_shape), dtype=torch.float32, device=q.device)
        part_lse = torch.empty((count, *lse_shape), dtype=torch.float32, device=q.device)
    # The current device, because Triton launches there. Tests run the kernels on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if device >= 0 else device
    results = out.stride(), lse.stride(), sinks.dtype
    strides = [each.stride() for each in (*read[:3], *scales)]
    layout = (*strides, read.table.stride(0), *results, inputs.cu_seqlens_q is None)
    operands = (*read, *scales, parts, part_lse)
    key = ("attend", spec, count, layout, current)
    attend = launch(kernels.attend, key, operands, lambda: launches.attend(spec, operands, *_settings(spec, device)))
    merge = None
    if count > 1:
        merged = (parts, part_lse, sinks, out, lse)
        merge_key = ("merge", spec, count, results, current)
        merge = launch(
            kernels.merge, merge_key, merged, lambda: launches.merge(spec, merged, *_settings(spec, device)[1:])
        )
    # A copied operand has other strides than the caller's tensor.
    if copied or attend is None or (count > 1 and merge is None):
        return out, lse, None
    return out, lse, launches.Launches(count, attend, merge)


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    return () if device == "sm90" else (f"{device}: proven on sm90 only",)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False) -> KernelProgram:
    """Returns the kernels of a call on the current GPU, and the buffers between them, as ``flash4`` does.

    Raises Unrecordable if this jaxlib or Triton differs from those that ``shared.programs.triton_programs`` knows.
    """
    import torch

    from attn_core.backends.triton_splitkv import program as splitkv_program

    device = torch.cuda.current_device()
    way = None if spec.invariant is None else how(spec, _multiprocessors(device))
    return splitkv_program.program(spec, *_settings(spec, device), way)


def program_operands(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands of a program that are not the call's own arrays: sinks and slopes in float32, by name."""
    return {name: arrays[name].astype("float32") for name in ("sinks", "alibi_slopes") if name in arrays}


def backward(spec: AttentionSpec, inputs: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Raises: paged keys and values are for inference."""
    raise NotImplementedError(f"backward: {FORWARD.kernel} has no gradient")
