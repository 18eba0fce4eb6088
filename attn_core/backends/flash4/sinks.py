"""Sinks on FlashAttention-4: our own kernels behind its forward and its backward.

A sink joins the softmax of a row by the row's log-sum-exp; ``shared.rewrites`` has the formulas. Kernels do it in one
pass, with the same bits in torch and in programs of XLA, which torch's operations and XLA's would not have.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.flash4 import own_kernels
from attn_core.backends.flash4.operands import readable
from attn_core.backends.flash4.own_kernels import OwnKernel

ROWS = 8
"""As in ``sinks_kernel``, which only a GPU's process can import."""


def add(out: Any, lse: Any, sinks: Any, into: Any = None, lane: Any = own_kernels) -> tuple[Any, Any]:
    """Adds the sinks to a forward's results: scales out in place, and returns (out, lse with sinks).

    Args:
        out: ``[..., tokens, heads, dim]``; lse: float32 ``[..., heads, tokens]``; sinks: ``[heads]``.
        into: a buffer for the log-sum-exp, or None.
        lane: launches the kernel, see ``own_kernels``.
    """
    import torch

    lse = lse.contiguous()
    new = torch.empty_like(lse) if into is None or not into.is_contiguous() else into
    if out.numel():
        lane.launch(_kernel("AddSinks", out), (out, lse, as_kernel_reads(sinks, lse), new))
    return out, new


def gradient(
    sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None, sums: Any = None, lane: Any = own_kernels
) -> Any:
    """Returns the gradient of the sinks, ``[heads]`` in their dtype, from out and lse with sinks.

    Args:
        into: a float32 buffer for it, or None; sums: a buffer of ``sums_shape``, or None.
    """
    import torch

    result = torch.empty(sinks.shape, dtype=lse.dtype, device=sinks.device) if into is None else into
    if out.numel() == 0:
        return result.zero_().to(sinks.dtype)
    out, dout = readable(out), readable(dout)
    if sums is None:
        sums = torch.empty(sums_shape(lse.shape), dtype=lse.dtype, device=sinks.device)
    others = () if dlse is None else (dlse.contiguous(),)
    lane.launch(
        _kernel("SinkGradient", out, dlse is not None),
        (out, lse.contiguous(), dout, *(others or (None,)), as_kernel_reads(sinks, lse), sums),
    )
    lane.launch(_kernel("SumOfSinks", sums), (sums, result))
    return result if into is not None else result.to(sinks.dtype)


def sums_shape(lse: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns the shape of the sums between both kernels of the gradient. lse: the shape of the log-sum-exp."""
    *rows, heads, tokens = lse
    return heads, rows[0] if rows else 1, -(-tokens // ROWS)


def scratch_like(lse: Any) -> Any:
    """Returns memory for the log-sum-exp without sinks."""
    import torch

    return torch.empty_like(lse)


def program_operands(arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the sinks as a program of XLA takes them, by name; empty if the call has none."""
    return {"sinks": arrays["sinks"].astype("float32")} if "sinks" in arrays else {}


def as_kernel_reads(sinks: Any, lse: Any) -> Any:
    """Returns the sinks in the dtype of the log-sum-exp, float32, dense."""
    return sinks.detach().to(lse.dtype).contiguous()


def _kernel(name: str, tensor: Any, *choices: Any) -> OwnKernel:
    """Returns a kernel for tensors of this dtype and as many axes."""
    return _named_kernel(name, str(tensor.dtype), tensor.dim(), choices)


@lru_cache(maxsize=32)
def _named_kernel(name: str, dtype: str, axes: int, choices: tuple[Any, ...]) -> OwnKernel:
    def code() -> Any:
        from attn_core.backends.flash4 import sinks_kernel

        return getattr(sinks_kernel, name)(*choices)

    return OwnKernel(f"attn_core.{name}({dtype}, {axes} axes, {choices})", code)
