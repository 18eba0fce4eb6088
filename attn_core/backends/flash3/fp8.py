"""FlashAttention 3 on e4m3 inputs: quantises q, k and v with one factor per (batch row or document, kv head).

The largest magnitude of a group becomes 448, the largest e4m3 number: a relative error of up to 2^-4 per element, and
of up to 2^-10 of the largest for small elements. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.rewrites import readable, writable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.errors import ShapeError

LARGEST = 448.0
"""The largest finite e4m3 (float8_e4m3fn)."""
SMALLEST = 2.0**-100
"""The smallest factor, so that a group of zeros is not divided by 0."""


def forward(
    spec: AttentionSpec, inputs: Inputs, into: Any, operator: Callable[..., Any], offsets: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Returns (out, lse) of the kernel on e4m3 inputs. It always writes bfloat16, which is converted for float16 calls.

    Args:
        operator: of the names of the tensors, returns a function of the tensors that runs the kernel.
        offsets: the cumulative lengths of queries and keys, or None for both.
    """
    sides = zip(inputs[:3], (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k))
    rounded, factors = zip(*(quantise(tensor, spec.num_kv_heads, lengths) for tensor, lengths in sides))
    native = spec.dtype == "bfloat16"
    out = writable(into[0]) if native and into is not None else None
    result, lse = attend(rounded, factors, out, operator, offsets)
    return result if native else result.to(inputs.q.dtype), lse


def attend(
    rounded: tuple[Any, ...], factors: tuple[Any, ...], out: Any, operator: Callable[..., Any], offsets: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Returns (out in bfloat16, lse) of q, k and v in float8_e4m3fn.

    Args:
        factors: float32 ``[batch or documents, kv_heads]`` for each; None for 1.
        out: a buffer for out, or None. operator, offsets: as in ``forward``.
    """
    run = operator("q", "k", "v", "q_descale", "k_descale", "v_descale", "out", "cu_seqlens_q", "cu_seqlens_k")
    result, lse, *_ = run(*map(readable, rounded), *factors, out, *offsets)
    return (result if out is None else out), lse


def check_widths(spec: AttentionSpec, own: AttentionSpec, kernel: str) -> None:
    """Raises ShapeError if the kernel has other widths than a call: float8 tensors are not padded.

    Args:
        own: the call at the kernel's widths.
    """
    for name in ("head_dim", "value_dim"):
        actual, width = getattr(spec, name), getattr(own, name)
        if actual != width:
            raise ShapeError(f"{name}={actual}: {kernel} has {width} channels; pad float8 tensors to them")


@without_gradient
def quantise(tensor: Any, kv_heads: int, cu_seqlens: Any = None) -> tuple[Any, Any]:
    """Returns the tensor as float8_e4m3fn, and the float32 factors that restore its values, ``[batch, kv_heads]``.

    Factors ignore NaN and Inf, so that these do not affect other rows. NaN and Inf themselves become NaN.

    Args:
        tensor: ``[batch, length, heads, dim]``, or ``[tokens, heads, dim]`` with ``cu_seqlens`` (int32, ``[documents +
            1]``), for which the factors are ``[documents, kv_heads]``. Heads of one kv head share its factor.
    """
    # Query heads share the factor of their kv head, because the kernel takes q's factors as [batch, kv_heads] too.
    grouped = tensor.unflatten(-2, (kv_heads, -1))  # [..., heads, dim] -> [..., kv_heads, group, dim]
    finite = grouped.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
    if cu_seqlens is None:
        factors = _factors(finite.amax((1, 3, 4)))
        of_rows = factors[:, None]  # [batch, kv_heads] -> [batch, length, kv_heads]
    else:
        factors, of_rows = _by_document(finite.amax((2, 3)), cu_seqlens)
    scaled = grouped * of_rows.reciprocal()[..., None, None]  # float32, as the factors are
    scaled.fmod_(2 * LARGEST)  # changes no finite value and turns Inf into NaN; some casts turn Inf into 448
    return scaled.to(_e4m3()).flatten(-3, -2), factors


def _by_document(largest: Any, cu_seqlens: Any) -> tuple[Any, Any]:
    """Returns the factors of documents and of tokens. largest: each token's largest value, ``[tokens, kv_heads]``."""
    import torch

    tokens, kv_heads = largest.shape
    documents = cu_seqlens.shape[0] - 1
    places = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:], places, right=True)
    # One extra row for tokens past the last offset, so that wrong offsets mix no such token into a document.
    maxima = largest.new_zeros(documents + 1, kv_heads, dtype=torch.float32)
    maxima.scatter_reduce_(0, document[:, None].expand(tokens, kv_heads), largest.float(), "amax")
    factors = _factors(maxima)
    return factors[:documents], factors[document]


def _factors(largest: Any) -> Any:
    return (largest.float() / LARGEST).clamp_min(SMALLEST)


def _e4m3() -> Any:
    import torch

    return torch.float8_e4m3fn
