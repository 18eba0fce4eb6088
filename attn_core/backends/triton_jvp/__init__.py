"""Our own Triton kernel for forward mode: out, lse and the tangents of both in one pass, without memory for scores.

A second kernel computes the largest logit of each row, for ``return_max_logit``; XLA launches it without Python.

Limits: head_dim and value_dim up to 256, no gradient. By name it also runs the forward alone. A program has all
channels of the logits and at most 128 of the values, so wider values compute the logits twice. float32 products are
sums of three TF32 products. A NaN in a key or value may reach queries of its document that do not see it, but no other
document.
Upstream: triton 3.6 to 3.9, as torch brings it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING

from attn_core.backends.contract import Backend, Buffers, ForwardModePass, Program, RowMaximumPass
from attn_core.backends.shared.kernel_programs import KernelProgram, operands_in_float32
from attn_core.backends.shared.readable import dense_channels, readable
from attn_core.backends.shared.triton import Numbers, launch, numbers_of, result_buffer
from attn_core.backends.support import Build, Support
from attn_core.backends.triton_jvp import launches
from attn_core.backends.triton_jvp.launches import Tiles
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="the Triton forward-mode kernel",
    devices=("cuda",),
    dtypes=("float32", "bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
)
ROW_MAXIMUM = replace(FORWARD, mask=True, key_ranges=True, bias=True, alibi=True)

OLDEST = 80
"""The oldest compute capability, times ten."""
MOST_PROGRAMS = 2**31 - 1
"""The most programs along the first axis of a CUDA grid."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses old GPUs, and grids that are too large."""
    reasons = []
    if device.startswith("sm") and int(device[2:]) < OLDEST:  # no bfloat16 and no TF32 before
        reasons.append(f"device {device}: {FORWARD.kernel} needs sm{OLDEST} or newer")
    programs = launches.programs(spec, launches.SMALLEST)
    if programs > MOST_PROGRAMS:
        sizes = f"q_len={spec.q_len} with {spec.documents or spec.batch} rows and {spec.num_heads} heads"
        reasons.append(f"{sizes}: {FORWARD.kernel} launches at most {MOST_PROGRAMS} programs, not {programs}")
    return tuple(reasons)


def probe() -> str:
    """Imports the kernel and returns Triton's version."""
    import triton

    from attn_core.backends.triton_jvp import kernels  # noqa: F401

    return str(triton.__version__)


def lower(spec: AttentionSpec) -> Numbers:
    """Returns the kernel's arguments that follow from the spec."""
    return {
        **numbers_of(spec),
        "PACKED": spec.packed,
        "BOTTOM_RIGHT": spec.alignment == "bottom_right",
        "LEFT": band(spec).left is not None,
    }


@lru_cache(maxsize=4096)
def _settings(spec: AttentionSpec, device: int) -> tuple[Numbers, Tiles]:
    return lower(spec), launches.tiles(spec, _shared_memory(device))


@cache
def _shared_memory(device: int) -> int:
    """Returns the bytes of shared memory that a program may use on a GPU for the tiles of ``launches``."""
    if device < 0:  # a CPU tensor: tests run the kernel in Triton's interpreter
        return 2**20
    import torch
    from triton.runtime.driver import driver

    most = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    # From compute capability 10 on, the compiler puts a few KiB more into shared memory.
    return int(most) - (5 * 1024 if torch.cuda.get_device_capability(device)[0] >= 10 else 0)


@cache
def _kernels() -> ModuleType:
    from attn_core.backends.triton_jvp import kernels

    return kernels


def forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    out, lse, _, _ = _run(spec, inputs, Tangents(), into or (None, None), (None, None), primals=True)
    return out, lse  # type: ignore[return-value]


def jvp(
    spec: AttentionSpec, inputs: Inputs, tangents: Tangents, into: Buffers | None = None, *, primals: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See ``ForwardModePass``."""
    return _run(spec, inputs, tangents, (None, None), into or (None, None), primals=primals)  # type: ignore[return-value]


def row_maximum(spec: AttentionSpec, inputs: Inputs) -> Tensor:
    """See ``RowMaximumPass``."""
    return launches.run_maximum(spec, inputs, *_maximum_settings(spec, inputs.q.get_device()))


def row_maximum_program(spec: AttentionSpec) -> KernelProgram:
    """Returns the kernel of ``row_maximum`` for XLA's buffers on the current device."""
    import torch

    return launches.maximum_program(spec, *_maximum_settings(spec, torch.cuda.current_device()))


@lru_cache(maxsize=4096)
def _maximum_settings(spec: AttentionSpec, device: int) -> tuple[Numbers, Tiles]:
    return lower(spec), launches.tiles_of_maximum(spec, _shared_memory(device))


def _run(
    spec: AttentionSpec,
    inputs: Inputs,
    tangents: Tangents,
    results: Buffers,
    moved: Buffers,
    *,
    primals: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns (out, lse, dout, dlse): the first two None without ``primals``, the others if nothing moves."""

    q, device = readable(inputs.q, dense_channels), inputs.q.get_device()
    moves = tuple(each is not None for each in (tangents.dq, tangents.dk, tangents.dv, tangents.dsinks))
    rows = [readable(each, dense_channels) for each in (inputs.k, inputs.v)]
    # Absent tensors are replaced by any other pointer; constants keep the kernel from reading them.
    moving = [q if each is None else readable(each, dense_channels) for each in tangents[:3]]
    sinks, dsinks = (q if each is None else each.contiguous() for each in (inputs.sinks, tangents.dsinks))
    offsets = [q if each is None else each.contiguous() for each in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
    out, lse = _buffers(spec, q, results) if primals else (None, None)
    dout, dlse = _buffers(spec, q, moved) if any(moves) else (None, None)
    written = [q if each is None else each for each in (out, lse, dout, dlse)]
    operands = (q, *rows, sinks, *moving, dsinks, *offsets, *written)
    strides = tuple(tensor.stride() for tensor in (q, *rows, *moving))
    key = ("jvp", spec, moves, primals, strides, sinks.dtype, dsinks.dtype)
    launch(
        _kernels().attend,
        key,
        operands,
        lambda: launches.attend(spec, strides, moves, primals, *_settings(spec, device)),
    )
    return out, lse, dout, dlse


def _buffers(spec: AttentionSpec, q: Tensor, given: Buffers) -> tuple[Tensor, Tensor]:
    import torch

    out = result_buffer(given[0], spec.out_shape, q.dtype, q.device)
    return out, result_buffer(given[1], spec.lse_shape, torch.float32, q.device)


BACKEND = Backend(
    name="triton_jvp",
    framework="torch",
    requires="triton>=3.6",
    forward_claims=FORWARD,
    backward_claims=None,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=None,
    forward_mode=ForwardModePass(claims=FORWARD, jvp=jvp, preference={"cuda": 10}),
    row_maximum=RowMaximumPass(
        claims=ROW_MAXIMUM,
        function=row_maximum,
        program=Program(make=row_maximum_program, operands=operands_in_float32),
        preference={"cuda": 10},
    ),
    writes_into=("forward", "jvp"),
)
