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

from functools import lru_cache
from typing import Any

from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.kernel_limits import GRID_LIMIT
from attn_core.backends.shared.programs.kernel_programs import KernelProgram
from attn_core.backends.support import Build, Support
from attn_core.backends.triton_ordered import calls, gradients, launches
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

    from attn_core.backends.triton_ordered import gradient_kernels, kernels, row_sums  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernels' scalar arguments, and the sizes that keep the order of sums."""
    return {**launches.settings_of(spec), **order.settings_of(spec)}


@lru_cache(maxsize=4096)
def _settings(spec: AttentionSpec) -> dict[str, Any]:
    return launches.settings_of(spec)


def forward(spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    return calls.forward(spec, inputs, into or (None, None), _settings(spec))


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None
) -> Gradients:
    """See ``Backend.backward``."""
    return calls.backward(spec, inputs, (out, lse, dout, dlse), into, _settings(spec))


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    return () if device in order.PROVEN else (f"{device}: proven on sm90 only",)


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False) -> KernelProgram:
    """Returns the kernels of a call on the current GPU, and the buffers between them, as ``flash4`` does.

    Raises Unrecordable if this jaxlib or Triton differs from those that ``shared.programs.triton_programs`` knows.
    """
    import torch

    from attn_core.backends.triton_ordered import program as ordered_program

    if direction == "backward":
        return ordered_program.backward(spec, _settings(spec), with_dlse)
    return ordered_program.forward(spec, _settings(spec), calls.multiprocessors(torch.cuda.current_device()))


def program_operands(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands of a program that are not the call's own arrays, by name: sinks and slopes in float32."""
    return {name: arrays[name].astype("float32") for name in ("sinks", "alibi_slopes") if name in arrays}
