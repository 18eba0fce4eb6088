"""FlashAttention 2: the kernels of the flash-attn package, dense and packed, with gradients.

Limits: float16 and bfloat16, head_dim up to 256 (what the installed build was compiled for is found by calling it), no
mask or bias, bottom-right alignment alone. Dropout keeps the weights that the kernel's own Philox stream names, in
steps of 1/256: with ``k = floor(255 * (1 - dropout)) + 1`` of 256 kept, while the scale is the exact 1 / (1 - dropout).
Upstream: flash-attn 2.6.2 to 2.8; 2.6.0 takes other arguments, and before 2.6.2 the gradient forgot softcap's slope.
2.6 returns eight tensors where later versions return four; the log-sum-exp is the third from behind in both.

Put right here: the log-sum-exp of rows that see no key (+inf in the kernel; its backward takes -inf); ALiBi under the
causal mask, where the kernel adds ``slope * key`` and so returns a log-sum-exp larger by ``slope * (query + offset)``
(float32 rounds it there); packed windows (see ``lower``); head dimensions, sinks and the gradient of the log-sum-exp
(``attn_core.torch_rewrites``). Packed tokens of no document come out as rows that see nothing.
ROCm builds take the same arguments and silently ignore some: ROCM_CK and ROCM_TRITON say which. Never run on an AMD GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from attn_core import torch_rewrites
from attn_core.backends import Gradients, Inputs
from attn_core.masks import band
from attn_core.spec import AttentionSpec
from attn_core.support import Build, Support
from attn_core.torch_rewrites import readable

FRAMEWORK = "torch"
REQUIRES = "flash-attn>=2.6.2,<3"

NAME = "the FlashAttention 2 kernel"
FORWARD = Support(
    kernel=NAME,
    devices=("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120", "gfx90a", "gfx942", "gfx950"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    softcap=True,
    alibi=True,
    sinks=True,
    packed=True,
    dropout=True,
    deterministic=True,
    lse=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD)
WRITES_INTO = True

ROCM_CK = Build("ROCm CK", without=("softcap",))
ROCM_TRITON = Build("ROCm Triton", without=("softcap", "window"))

OLDEST = (2, 6, 2)
WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Each stands for the head dimensions above the one before it: one kernel serves them all (160 and 224 in old ones)."""
SMALL_MEMORY = ("sm86", "sm89", "sm120")
"""Devices with 99 KiB of shared memory a block: no gradient kernel for dropout with more than 192 channels fits."""
GRID = 65535
"""The most that CUDA's grid holds along the axes of batch and heads."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """What the kernel gets wrong, or cannot launch, that no single claim names."""
    reasons = [*torch_rewrites.refusals(spec), *_dropout_refusals(spec, device, build)]
    rocm = device.startswith("gfx")
    if not spec.packed and _wrong_window(spec):
        lengths = f"q_len {spec.q_len} and kv_len {spec.kv_len}"
        why = "takes kv_len for an open or long right side, too little where q_len exceeds kv_len + 1"
        reasons.append(f"window={spec.window} with {lengths}: {NAME} {why}")
    if spec.alibi_shape and spec.alignment == "top_left" and (spec.packed or spec.q_len != spec.kv_len):
        reasons.append(f"alignment=top_left with alibi_slopes: {NAME} measures from the bottom_right diagonal")
    rows = spec.documents or spec.batch
    if max(rows, spec.num_heads) > GRID:
        reasons.append(f"{rows} rows and {spec.num_heads} heads: {NAME} launches at most {GRID} of each")
    if not rocm and spec.needs_backward and _overflows(spec, build):
        reasons.append(f"q_len={spec.q_len}: the gradient of flash-attn before 2.8.3 counts its buffer in 32 bits")
    if not rocm and build and build.version and device in ("sm100", "sm120") and build.version < (2, 7, 3):
        reasons.append(f"device {device}: {NAME} has it since flash-attn 2.7.3")
    return (*reasons, *(_rocm_refusals(spec, build) if rocm else ()))


def _wrong_window(spec: AttentionSpec) -> bool:
    """Whether the kernel's stand-in for an open right side, kv_len, hides or shows other keys than the window does."""
    edge = band(spec)
    bounded = edge.left is not None and edge.left < spec.kv_len
    if edge.right is not None and edge.right < spec.kv_len or edge.hides_nothing(spec.q_len, spec.kv_len):
        return False
    return (bounded or edge.right is not None) and spec.q_len > spec.kv_len + 1


def _dropout_refusals(spec: AttentionSpec, device: str, build: Build | None) -> Iterator[str]:
    if not spec.dropout:
        return
    if spec.softcap is not None:
        yield f"dropout={spec.dropout} with softcap={spec.softcap}: {NAME} has one or the other"
    if not 1 / 256 <= spec.dropout <= 255 / 256:
        yield f"dropout={spec.dropout}: {NAME} drops in steps of 1/256"
    width = width_of(max(spec.head_dim, spec.value_dim), build.head_dims if build else ())
    if spec.needs_backward and width > 192 and device in SMALL_MEMORY:
        yield f"backward: dropout={spec.dropout} with head_dim={width}: {NAME} has none on {device}"


def _overflows(spec: AttentionSpec, build: Build | None) -> bool:
    """Whether float32 sums of dq need more elements than an int counts, where the build (or none known) minds."""
    if build is not None and build.version >= (2, 8, 3):
        return False
    rows = -(-(spec.max_len_q or spec.q_len) // 128) * 128 + 128 * (spec.documents or 0)
    return rows * spec.num_heads * 64 * -(-max(spec.head_dim, spec.value_dim) // 64) >= 2**31


def _rocm_refusals(spec: AttentionSpec, build: Build | None) -> Iterator[str]:
    unknown = {f"softcap={spec.softcap}": spec.softcap is not None, f"window={spec.window}": spec.window != (None, None)}
    for asked in (name for name, used in unknown.items() if used and build is None):
        yield f"{asked}: ROCm builds of flash-attn ignore it silently, and which build this is is not known"
    if spec.alibi_shape:
        yield "alibi_slopes: the log-sum-exp of ROCm builds of flash-attn with ALiBi is not known"
    if spec.dropout:
        yield f"dropout={spec.dropout}: ROCm builds of flash-attn do not draw it from the seed of the call"
    if spec.deterministic and spec.needs_backward and build != ROCM_CK:
        yield "backward: deterministic=True: the ROCm Triton build of flash-attn ignores it"


def probe() -> str:
    """flash-attn's version, once its interface and its extension import (flash-attn-4 alone has neither)."""
    _extension()
    version = import_module("flash_attn").__version__
    if _release(version) < OLDEST:
        raise ImportError(f"flash-attn {version}: the gradient with softcap is wrong before 2.6.2")
    return version


@cache
def build() -> Build:
    """The head dimensions that the installed build was compiled for, by calling it; or which ROCm build it is."""
    import torch

    version = probe()
    if torch.version.hip:
        return ROCM_TRITON if _is_triton() else ROCM_CK
    head_dims = tuple(width for width in WIDTHS if _runs(width))
    if not head_dims:
        raise RuntimeError(f"flash-attn {version}: none of its kernels runs on this GPU")
    return Build(f"flash-attn {version}", head_dims=head_dims, version=_release(version))


def _runs(width: int) -> bool:
    """Whether a tiny call gives the mean of ones."""
    import torch

    ones = torch.ones(1, 8, 1, width, dtype=torch.bfloat16, device="cuda")
    out = torch.zeros_like(ones)  # a kernel that writes nothing must not find an earlier call's ones
    try:
        _extension().fwd(ones, ones, ones, out, None, 0.0, 1.0, False, -1, -1, 0.0, False, None)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return bool((out == 1).all())


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def width_of(dim: int, head_dims: tuple[int, ...]) -> int:
    """The head dimension to run ``dim`` at, given the build's: the next multiple of 8 if its kernel is there."""
    eights = -(-dim // 8) * 8
    native = next((width for width in WIDTHS if width >= eights), eights)
    if not head_dims or native in head_dims:
        return eights
    return next((width for width in head_dims if width > eights), eights)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """The kernel's own arguments, and whether its log-sum-exp needs putting right.

    The kernel takes a side of ``max_seqlen_k`` or more for an open one, and that for an open one beside a bounded one.
    Packed, it may be larger than any document: of ``max_seqlen_q - 1`` at least, the stand-in hides nothing (dense, it is
    kv_len, and ``refuses`` steps in). It only sizes launches otherwise. Of documents that all have one query the kernel
    makes a batch of grouped heads; max_seqlen_q = 2 keeps it from that where some have none.
    """
    edge, lengths, max_k = band(spec), {}, spec.kv_len
    if spec.packed:
        max_q = max(spec.max_len_q or 0, 1 if spec.q_len == spec.documents else 2)
        max_k = max(spec.max_len_k or 0, max_q - 1)
        lengths = {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    causal = edge.right == 0  # the kernel then sets the right side itself
    left = -1 if edge.left is None or edge.left >= max_k else edge.left
    right = -1 if causal or edge.right is None or edge.right >= max_k else edge.right
    return {
        **lengths,
        "dropout_p": spec.dropout,
        "softmax_scale": spec.scale,
        "causal": causal,
        "window_size_left": left,
        "window_size_right": right,
        "softcap": spec.softcap or 0.0,
        "deterministic": spec.deterministic,
        "empty_rows": spec.packed or edge.empties_a_row(spec.q_len, spec.kv_len),
        "shifted_lse": spec.alibi_shape is not None and causal and left < 0,
    }


@cache
def _extension() -> Any:
    """The module of ``fwd``, ``bwd``, ``varlen_fwd`` and ``varlen_bwd``."""
    interface = import_module("flash_attn.flash_attn_interface")  # loads torch's libraries, which the extension needs
    return interface.flash_attn_gpu if _is_triton() else import_module("flash_attn_2_cuda")


def _is_triton() -> bool:
    return getattr(import_module("flash_attn.flash_attn_interface"), "USE_TRITON_ROCM", False)


def forward(spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    return torch_rewrites.forward(KERNEL, spec, inputs, into)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None
) -> Gradients:
    """See ``Backend.backward``."""
    return torch_rewrites.backward(KERNEL, spec, inputs, out, lse, dout, dlse, into)
