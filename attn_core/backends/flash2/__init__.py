"""FlashAttention 2: the kernels of the flash-attn package, dense and packed, with gradients.

Limits: float16 and bfloat16, head_dim up to 256 (``build`` finds the compiled ones by tiny calls), no mask or bias,
bottom-right alignment only. Dropout follows the kernel's own random stream and retains ``floor(255 * (1 - dropout)) +
1`` of 256 weights on average, while their scale is the exact 1 / (1 - dropout).
Upstream: flash-attn 2.6.2 to 2.8: 2.6.0 takes other arguments, and before 2.6.2 the gradient lacks softcap's slope.
2.6 returns eight tensors, later versions four; the log-sum-exp is the third from the end in both.

Corrections: the log-sum-exp of rows that see no key (+inf in the kernel, whose backward also takes -inf) and of causal
ALiBi (``shared.flash2_conventions``); packed windows (``lower``); head dimensions, sinks and the gradient of the
log-sum-exp (``shared.rewrites``). Packed tokens outside all documents come out as rows that see no key.
AMD's GPUs: ``rocm.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, Timing
from attn_core.backends.shared import kernel_limits, pages, rewrites
from attn_core.backends.shared.caches import cached_once
from attn_core.backends.shared.first_calls import averages, runs
from attn_core.backends.shared.flash2_conventions import generator_of, longest_query, rng_state_of, shift_lse, slopes_of
from attn_core.backends.shared.known_bad import numbers_of
from attn_core.backends.shared.readable import readable, readable_rows, writable
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

NAME = "the FlashAttention 2 kernel"

ROCM_CK = Build("ROCm CK", without=("softcap",))
ROCM_TRITON = Build("ROCm Triton", without=("softcap", "window"))

WIDTHS = (32, 64, 96, 128, 160, 192, 224, 256)
"""The widths of the kernels. Each kernel also serves smaller dimensions (160 and 224 exist in old versions only)."""
SMALL_MEMORY = ("sm86", "sm89", "sm120")
"""Devices with 99 KiB of shared memory per block: dropout's gradient kernel does not fit above head_dim 192."""

FORWARD = Support(
    kernel=NAME,
    devices=("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm120"),
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
    partial=True,
    lse_gradient=True,
    paged=True,
    invariant=("batch",),
)
BACKWARD = replace(FORWARD, paged=False)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses combinations of features that the kernel computes wrongly or cannot launch."""
    width = rewrites.width_of(max(spec.head_dim, spec.value_dim), WIDTHS, build.head_dims if build else ())
    reasons = [*rewrites.refusals(spec), *_combinations(spec, device, width)]
    return (*reasons, *kernel_limits.grid(spec, NAME))


def _combinations(spec: AttentionSpec, device: str, width: int) -> Iterator[str]:
    """Refuses combinations of features that the kernel of a width computes wrongly or cannot launch."""
    if spec.paged is not None:
        yield from pages.flash2_refusals(spec, NAME, width)
    if spec.invariant is not None:
        yield from _invariant_refusals(spec)
    if spec.alibi_shape and spec.alignment == "top_left" and (spec.packed or spec.q_len != spec.kv_len):
        yield f"alignment=top_left with alibi_slopes: {NAME} measures from the bottom_right diagonal"
    if spec.dropout and spec.softcap is not None:
        yield f"dropout={spec.dropout} with softcap={spec.softcap}: {NAME} has one or the other"
    if spec.dropout and not 1 / 256 <= spec.dropout <= 255 / 256:
        yield f"dropout={spec.dropout}: {NAME} drops in steps of 1/256"
    if spec.dropout and spec.needs_backward and width > 192 and device in SMALL_MEMORY:
        yield f"backward: dropout={spec.dropout} with head_dim={width}: {NAME} has none on {device}"


def _invariant_refusals(spec: AttentionSpec) -> Iterator[str]:
    """Refuses what has other bits in another batch. The rows of a dense call run as documents, forwards."""
    why = {
        "pages": spec.paged is not None and "splits the keys by the number of sequences",
        "packed documents and gradients": spec.packed
        and spec.needs_backward
        and "sums dq in parts whose number depends on the documents",
        "alibi_slopes of each row": len(spec.alibi_shape or ()) == 2 and "takes one slope per head there",
    }
    for what, reason in why.items():
        if reason:
            yield f"invariant={spec.invariant!r} with {what}: {NAME} {reason}"


def probe() -> str:
    """Imports flash-attn's interface and extension (flash-attn-4 alone has neither) and returns its version."""
    _extension()
    version = import_module("flash_attn").__version__
    if numbers_of(version) < (2, 6, 2):
        raise ImportError(f"flash-attn {version}: the gradient with softcap is wrong before 2.6.2")
    return version


@cached_once
def build() -> Build:
    """Finds the head dimensions of the installed build with tiny calls, or returns which ROCm build it is."""
    import torch

    version = probe()
    if torch.version.hip:
        return ROCM_CK if _extension().__name__ == "flash_attn_2_cuda" else ROCM_TRITON
    head_dims = tuple(width for width in WIDTHS if _runs(width))
    if not head_dims:
        raise RuntimeError(f"flash-attn {version}: none of its kernels runs on this GPU")
    return Build(f"flash-attn {version}", head_dims=head_dims, version=numbers_of(version))


def _runs(width: int) -> bool:
    return runs(partial(averages, _forward), width)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's arguments, and whether its log-sum-exp needs a correction.

    The kernel treats a side of ``max_seqlen_k`` or more as open, and replaces an open side next to a bounded one by
    ``max_seqlen_k``. For packed calls we pass at least ``max_seqlen_q - 1``, a distance that hides nothing.
    """
    edge, lengths, max_k = band(spec), {}, spec.kv_len
    if spec.packed:
        # For one query the kernel splits the keys into as many parts as fill the GPU.
        max_q = longest_query(spec) if spec.invariant is None else max(longest_query(spec), 2)
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
        "deterministic": spec.deterministic or spec.invariant is not None,
        "empty_rows": spec.packed or edge.empties_a_row(spec.q_len, spec.kv_len),
        "shifted_lse": spec.alibi_shape is not None and causal and left < 0,
    }


@cached_once
def _extension() -> ModuleType:
    """Returns the module that has ``fwd``, ``bwd``, ``varlen_fwd`` and ``varlen_bwd``."""
    interface = import_module("flash_attn.flash_attn_interface")  # loads torch's libraries, which the extension needs
    triton = getattr(interface, "USE_TRITON_ROCM", False)
    return interface.flash_attn_gpu if triton else import_module("flash_attn_2_cuda")


def shortcut(spec: AttentionSpec) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """See ``Backend.shortcut_of``: the kernel alone, for calls without a gradient."""
    how = lower(spec)
    if spec.invariant is not None or spec.needs_backward or not rewrites.is_native(KERNEL, spec) or how["empty_rows"]:
        return None
    kernel, settings = _extension().fwd, _settings(spec, how, None)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = kernel(*readable_rows(q, k, v), None, *settings, False, None)
        return results[0], results[-3]

    return run


def _forward(spec: AttentionSpec, inputs: Any, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) by the kernels of the extension. The order of their arguments is the extension's."""
    if spec.paged is not None:
        return pages.flash2(spec, inputs, into, _extension().varlen_fwd, _settings(spec, lower(spec), None))
    if spec.invariant is not None and not spec.packed:
        return _forward_as_documents(spec, inputs)
    how, slopes, extension = lower(spec), slopes_of(spec, inputs), _extension()
    buffer = None if into is None else writable(into[0])
    run = extension.varlen_fwd if spec.packed else extension.fwd
    offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_k, None, None, None) if spec.packed else ()
    generator = generator_of(inputs) if spec.dropout else None
    q, k, v = readable(inputs.q), readable(inputs.k), readable(inputs.v)
    results = run(q, k, v, buffer, *offsets, *_settings(spec, how, slopes), False, generator)
    out, lse = results[0], results[-3]
    if buffer is not None and out.data_ptr() == buffer.data_ptr():
        out = buffer  # the kernel may return another view of it, which the caller would copy onto itself
    if how["empty_rows"]:  # +inf in the kernel; nan= leaves NaN as it is, nan_to_num_ would write 0
        lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)
    # Only slopes shift it.
    return out, shift_lse(spec, inputs, lse, slopes, -1) if how["shifted_lse"] else lse  # type: ignore[arg-type]


def _backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, into: Gradients | None
) -> Gradients:
    if spec.invariant is not None and spec.batch > 1:
        return _backward_of_rows(spec, inputs, out, lse, dout)
    how, slopes, extension = lower(spec), slopes_of(spec, inputs), _extension()
    buffers = (None, None, None) if into is None else tuple(map(writable, into[:3]))
    run = extension.varlen_bwd if spec.packed else extension.bwd
    offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_k) if spec.packed else ()
    rng_state = rng_state_of(inputs) if spec.dropout else None
    lse = shift_lse(spec, inputs, lse, slopes, 1) if how["shifted_lse"] else lse  # type: ignore[arg-type]
    tensors = map(readable, (dout, inputs.q, inputs.k, inputs.v, out))
    settings = _settings(spec, how, slopes)
    gradients = run(*tensors, lse.contiguous(), *buffers, *offsets, *settings, how["deterministic"], None, rng_state)
    return Gradients(*gradients[:3])


def _settings(spec: AttentionSpec, how: dict[str, Any], slopes: Tensor | None) -> tuple[object, ...]:
    """Returns the arguments that all four functions share, in order. True: packed functions zero results first."""
    mask = (how["causal"], how["window_size_left"], how["window_size_right"], how["softcap"])
    if spec.packed:
        lengths = (how["max_seqlen_q"], how["max_seqlen_k"])
        return (slopes, *lengths, how["dropout_p"], how["softmax_scale"], True, *mask)
    return (slopes, how["dropout_p"], how["softmax_scale"], *mask)


# With ``invariant``: the kernel chooses its work by the batch in dense calls only. So the rows of a dense call run as
# packed documents of equal lengths, which it neither splits nor chooses tiles for; or each row runs as its own call.


@lru_cache(maxsize=1024)
def _packed_spec(spec: AttentionSpec) -> AttentionSpec:
    """Returns a dense call as one of packed documents."""
    lengths: dict[str, Any] = {"q_len": spec.batch * spec.q_len, "kv_len": spec.batch * spec.kv_len}
    return replace(spec, batch=1, documents=spec.batch, max_len_q=spec.q_len, max_len_k=spec.kv_len, **lengths)


def _packed_inputs(spec: AttentionSpec, inputs: Inputs) -> Inputs:
    import torch

    def offsets(length: int) -> Tensor:
        return torch.arange(0, spec.batch * length + 1, length, dtype=torch.int32, device=inputs.q.device)

    q, k, v = (tensor.flatten(0, 1) for tensor in inputs[:3])
    return inputs._replace(q=q, k=k, v=v, cu_seqlens_q=offsets(spec.q_len), cu_seqlens_k=offsets(spec.kv_len))


def _forward_as_documents(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a dense call."""
    out, lse = _forward(_packed_spec(spec), _packed_inputs(spec, inputs), None)
    # [batch * q_len, heads, dim] -> [batch, q_len, heads, dim]; [heads, batch * q_len] -> [batch, heads, q_len]
    rows = (spec.batch, spec.q_len)
    return out.unflatten(0, rows), lse.unflatten(1, rows).transpose(0, 1).contiguous()


def _backward_of_rows(spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor) -> Gradients:
    """Returns the gradients of a dense call, row by row."""
    import torch

    one, parts = replace(spec, batch=1), []
    for row in range(spec.batch):
        here = slice(row, row + 1)
        q, k, v = (tensor[here] for tensor in inputs[:3])
        parts.append(_backward(one, inputs._replace(q=q, k=k, v=v), out[here], lse[here], dout[here], None)[:3])
    return Gradients(*(torch.cat(gradients) for gradients in zip(*parts, strict=True)))


KERNEL = rewrites.Kernel(_forward, _backward, lambda dim: rewrites.width_of(dim, WIDTHS, build().head_dims))
forward, backward = partial(rewrites.forward, KERNEL), partial(rewrites.backward, KERNEL)


BACKEND = Backend(
    name="flash2",
    framework="torch",
    requires="flash-attn>=2.6.2,<3",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=build,
    shortcut=shortcut,
    writes_into=("forward", "backward"),
    # It comes after the kernels of newer GPUs, and before torch's copy of it.
    preference={"cuda": 40},
    paged_preference={"cuda": 30},
    also_called={
        "flash": 10,
        "fa": 10,
        "flash_attention": 20,
        "fa2": 10,
        "flash_2": 10,
        "flash_attention_2": 10,
        "flash_attn_2": 10,
    },
    timing=Timing(in_callback=(50.0, 200.0)),
    splits_keys=True,
    for_cache_rows=True,
)
