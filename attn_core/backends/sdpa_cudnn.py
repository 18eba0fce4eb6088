"""cuDNN's attention on NVIDIA GPUs, through torch's raw ops.

Limits: fp16 and bf16, head_dim up to 128 (256 on sm90 with cuDNN 9.10), two keys or more, causal from the top left, no
windows, softcap, bias, ALiBi, dropout or packed documents. A boolean mask becomes an additive one of 0 and -inf, exact
in any dtype; a float bias would be rounded to the dtype of q, so it is refused. ``shared.rewrites`` adds value_dim,
sinks and the gradient of the log-sum-exp. The backward, and the log-sum-exp of a single query, add in any order, so
equal bits are not claimed.
Upstream: ``aten::_scaled_dot_product_cudnn_attention`` and its backward, torch 2.11 to 2.15, cuDNN 9. Corrections: rows
that see no key are shown every key and their results discarded, because versions treat them differently; the backward
gets out, dout and the log-sum-exp in one layout, because torch caches plans by the layout of q, k and v alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from attn_core.backends.shared import rewrites
from attn_core.backends.shared.aten_masks import compute_capability, limits, needed_band
from attn_core.backends.support import Build, Support
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "torch"
REQUIRES = "torch>=2.11 with CUDA and cuDNN 9"
NAME = "cuDNN attention"

FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    mask=True,
    sinks=True,
    lse=True,
    partial=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD)

NO_WEIGHT = 1e30
"""A log-sum-exp with which every weight is 0 and arithmetic stays finite."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what cuDNN lacks or a version of it computes wrongly. Assumes the worst of an unknown version."""
    version = build.version if build is not None else ()
    spoken = f"cuDNN {'.'.join(map(str, version))}" if version else "an unknown cuDNN"
    reasons = [*rewrites.refusals(spec), *limits(spec, device, NAME)]
    edge, widest = needed_band(spec), max(spec.head_dim, spec.value_dim)
    # With a mask, the band becomes part of the mask, where any diagonal is possible.
    if spec.causal and edge.right is not None and edge.offset and not spec.mask_shape:
        reasons.append(
            f"causal, bottom_right, with q_len {spec.q_len} and kv_len {spec.kv_len}: {NAME} has top_left only"
        )
    if spec.kv_len == 1:
        reasons.append(f"kv_len=1: {NAME} needs 2 keys or more")
    # The claim refuses widths above 256 on every device.
    if 128 < widest <= 256 and not (device == "sm90" and version >= (9, 10)):
        reasons.append(
            f"head_dim={widest} on {device} with {spoken}: {NAME} stops at 128, on sm90 from cuDNN 9.10 at 256"
        )
    return (*reasons, *_known_bugs(spec, compute_capability(device), version, spoken))


def _known_bugs(spec: AttentionSpec, capability: int, version: tuple[int, ...], spoken: str) -> list[str]:
    reasons = []
    bare_causal = needed_band(spec).right == 0 and not spec.mask_shape
    if spec.needs_backward and capability == 90:
        if version < (9, 26) and spec.kv_len % 128 == 64 and not bare_causal:
            reasons.append(
                f"backward: kv_len={spec.kv_len} (64 more than a multiple of 128) without causal or with a mask: "
                f"NaN in dq under {spoken}, before 9.26 (pytorch#196678)"
            )
        if spec.q_len == 1:
            reasons.append(f"backward: q_len=1: NaN in dk and dv under {spoken} (cudnn-frontend#1072)")
    # Fixed in 9.25.1 and in the patch release 9.24.1.
    no_decoding = not version or ((9, 19) <= version < (9, 25, 1) and version[:3] != (9, 24, 1))
    if spec.q_len == 1 and 100 <= capability < 120 and no_decoding:
        reasons.append(f"q_len=1 on sm{capability}: wrong under {spoken}, from 9.19 to 9.25.0 (pytorch#193893)")
    return reasons


def probe() -> str:
    """Checks that torch has the op and cuDNN, and returns both versions."""
    import torch

    _kernels()
    version = build().version
    return f"{torch.__version__} (cuDNN {'.'.join(map(str, version))})"


def build() -> Build:
    """Returns cuDNN's version, which decides what it computes correctly."""
    import torch

    number = torch.backends.cudnn.version()
    if number is None or number < 90000:
        raise ImportError(f"torch {torch.__version__} has no cuDNN 9: found {number}")
    version = (number // 10000, number // 100 % 100, number % 100)  # 91900 is 9.19.0
    return Build(f"cuDNN {'.'.join(map(str, version))}", version=version)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments. With a mask, causal becomes part of the mask."""
    edge = needed_band(spec)
    masked = spec.mask_shape is not None
    return {
        "is_causal": edge.right is not None and not masked,
        "band_in_mask": edge.right is not None and masked,
        "scale": spec.scale,
    }


@cache
def _kernels() -> tuple[Any, Any]:
    import torch

    ops = torch.ops.aten
    return ops._scaled_dot_product_cudnn_attention.default, ops._scaled_dot_product_cudnn_attention_backward.default


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    import torch

    with torch.no_grad():
        return rewrites.forward(KERNEL, spec, inputs)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    import torch

    with torch.no_grad():
        return rewrites.backward(KERNEL, spec, inputs, out, lse, dout, dlse)


def _forward(spec: AttentionSpec, inputs: Inputs, into: Any) -> tuple[Any, Any]:
    """Runs the op, which allocates its results; ``into`` is unused."""
    how = lower(spec)
    # [batch, seq, heads, dim] -> [batch, heads, seq, dim], as views
    q, k, v = (rewrites.readable(tensor).transpose(1, 2) for tensor in inputs[:3])
    bias, empty = additive(spec, inputs) if spec.mask_shape else (None, None)
    out, lse, *_ = _kernels()[0](q, k, v, bias, True, 0.0, how["is_causal"], False, scale=how["scale"])
    lse = lse.reshape(spec.lse_shape)
    if empty is not None:
        out, lse = out.masked_fill_(empty, 0.0), lse.masked_fill(empty[..., 0], float("-inf"))
    return out.transpose(1, 2), lse


def _backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any) -> Gradients:
    import torch

    how = lower(spec)
    q, k, v = (rewrites.readable(tensor).transpose(1, 2) for tensor in inputs[:3])
    bias = None
    if spec.mask_shape:
        bias, _ = additive(spec, inputs)
        lse = lse.masked_fill(lse == -torch.inf, NO_WEIGHT)  # exp(score - 1e30) is 0, without -inf minus -inf
    # Always the same layout: torch caches plans by the strides of q, k and v, but a plan fixes the strides of all.
    out, dout = (tensor.contiguous().transpose(1, 2) for tensor in (out, dout))
    random_state = q.new_empty((), dtype=torch.int64)  # required by the op, unused without dropout
    gradients = _kernels()[1](
        dout,
        q,
        k,
        v,
        out,
        lse.contiguous()[..., None],
        random_state,
        random_state,
        bias,
        None,
        None,
        spec.q_len,
        spec.kv_len,
        0.0,
        how["is_causal"],
        scale=how["scale"],
    )
    return Gradients(*(gradient.transpose(1, 2) for gradient in gradients))


def additive(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """Returns the additive mask and the rows that see no key.

    The mask is ``[batch or 1, heads or 1, q_len or 1, kv_len]``, 0 or -inf in q's dtype; rows that see no key are 0
    throughout, so the kernel sees every key there. The rows are ``[batch or 1, heads or 1, q_len or 1, 1]``.
    """
    import torch

    seen, device = inputs.mask, inputs.q.device
    if lower(spec)["band_in_mask"]:
        rows, columns = torch.arange(spec.q_len, device=device)[:, None], torch.arange(spec.kv_len, device=device)
        seen = seen & needed_band(spec).contains(rows, columns)
    seen = seen.expand(*seen.shape[:3], spec.kv_len)
    empty = ~seen.any(-1, keepdim=True)
    added = torch.zeros(seen.shape, dtype=inputs.q.dtype, device=device)
    return added.masked_fill_(~(seen | empty), -torch.inf), empty


def _width(dim: int) -> int:
    return -(-dim // 8) * 8


KERNEL = rewrites.Kernel(_forward, _backward, _width)
"""The kernel that ``shared.rewrites`` completes."""
