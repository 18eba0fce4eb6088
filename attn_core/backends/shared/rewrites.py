"""Exact rewrites for features that a CUDA kernel lacks: head widths, sinks, the gradient of the log-sum-exp.

With P the softmax weights, A = sum_j P_j k_j and g the gradient of the log-sum-exp, by row:

    sinks      gate = sigmoid(lse - sink);  out' = gate * out;  lse' = log(exp(lse) + exp(sink)).
               With (out', lse'), a kernel's backward computes with the weights exp(s - lse') and the row sum
               dout . out', and so is exact; dsink = -sum_rows (1 - gate) * (dout . out' - g).
    widths     zeros appended to q, k and v change neither scores nor log-sum-exp; the scale is always explicit.
    gradient   s_ij enters the log-sum-exp with weight P_ij: dq_i += scale * g_i * A_i, which is the kernel's forward
    of lse     with v = k; dk_j += scale * sum_i P_ij g_i q_i, which is the dv of its backward with dout = g * q.

The last rewrite holds if scores are ``scale * q . k`` plus constants, so not with a softcap. Rows that see no key have
weight 0. Source: the derivative of softmax attention; the tests check it in float64 against the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Buffers
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor


class Kernel(NamedTuple):
    """A kernel's forward and backward for the calls that it supports itself: its own head widths, no sinks.

    Attributes:
        forward: ``(spec, inputs, into) -> (out, lse)``; lse natural, float32, -inf for rows that see no key.
        backward: ``(spec, inputs, out, lse, dout, into) -> Gradients``, exact for any out and lse.
        width: maps a head dimension to the one that the kernel runs it at.
        same_width: False if the kernel's value_dim may differ from head_dim; then v is padded separately from q and k.
        lse_gradient: whether backward takes a keyword ``dlse``, which is 0 in rows that see no key.
        add_sinks: ``(out, lse, sinks, into) -> (out, lse)`` of its own, which writes into out; into: a buffer for lse.
        sink_gradient: its own ``sink_gradient``. Kernels without these two use the operations below.
    """

    forward: Callable[[AttentionSpec, Inputs, Buffers | None], tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]
    width: Callable[[int], int]
    same_width: bool = True
    lse_gradient: bool = False
    add_sinks: Callable[..., tuple[Tensor, Tensor]] | None = None
    sink_gradient: Callable[..., Tensor] | None = None

    def runs(self, spec: AttentionSpec) -> AttentionSpec:
        """Returns the call that the kernel runs for a call: at its own widths, without sinks."""
        return _widened(self, spec) or spec


def refusals(spec: AttentionSpec) -> tuple[str, ...]:
    """Returns refusals of calls that the rewrite of the log-sum-exp's gradient does not cover.

    For kernels that have no gradient of the log-sum-exp themselves.
    """
    if not (spec.return_lse and spec.needs_backward):
        return ()
    uncovered = {
        f"softcap={spec.softcap}": spec.softcap is not None,
        f"dropout={spec.dropout}": spec.dropout > 0,
        "gradient of the bias": spec.bias_gradient,
    }
    why = "the kernel has no gradient of the log-sum-exp, and the rewrite that replaces it does not cover this"
    return tuple(f"return_lse with gradients and {name}: {why}" for name, used in uncovered.items() if used)


def is_native(kernel: Kernel, spec: AttentionSpec) -> bool:
    """Returns whether the kernel's own forward, and torch's derivative of it, compute the call without a rewrite.

    torch's derivative ignores the gradient of the log-sum-exp.
    """
    return _widened(kernel, spec) is None and not (spec.return_lse and spec.needs_backward)


def forward(kernel: Kernel, spec: AttentionSpec, inputs: Inputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of any call, with the rewrites that the kernel needs; ``into`` as in ``Backend.forward``."""
    wide = _widened(kernel, spec)
    if wide is None:
        return kernel.forward(spec, inputs, into)
    out_buffer, lse_buffer = into or (None, None)
    # With sinks or a padded out, the kernel's result is not the call's, so it does not go into the caller's buffers.
    buffers: Any = (None if spec.sinks and kernel.add_sinks is None else out_buffer, None if spec.sinks else lse_buffer)
    padded = wide.value_dim != spec.value_dim
    buffers = None if padded or buffers == (None, None) else buffers
    out, lse = kernel.forward(wide, _wide_inputs(wide, inputs), buffers)
    if spec.sinks and kernel.add_sinks is not None:
        out, lse = kernel.add_sinks(out, lse, inputs.sinks, lse_buffer)
    out = out[..., : spec.value_dim] if padded else out
    if not spec.sinks or kernel.add_sinks is not None:
        return out, lse
    needs_lse = spec.return_lse or spec.needs_backward
    return with_sinks(out, lse, inputs.sinks, needs_lse=needs_lse, into=out_buffer)


def backward(
    kernel: Kernel,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    into: Gradients | None = None,
) -> Gradients:
    """Returns the gradients of any call from the out and lse of ``forward``; ``into`` as in ``Backend.backward``."""
    wide = _widened(kernel, spec)
    native = {}
    if kernel.lse_gradient and dlse is not None:  # a row that sees no key has weight 0, and its dlse may be NaN or inf
        native = {"dlse": dlse.masked_fill(lse == -float("inf"), 0.0)}
    if wide is None:
        wide, gradients = spec, kernel.backward(spec, inputs, out, lse, dout, into, **native)
    else:
        wider = (wide.head_dim, wide.value_dim) != (spec.head_dim, spec.value_dim)
        saved = (padded(out, wide.value_dim), lse, padded(dout, wide.value_dim))
        # Padded gradients are wider than the caller's buffers, so they are cut afterwards.
        gradients = kernel.backward(wide, _wide_inputs(wide, inputs), *saved, None if wider else into, **native)
        if wider:
            dq, dk, dv = (
                gradients.dq[..., : spec.head_dim],
                gradients.dk[..., : spec.head_dim],
                gradients.dv[..., : spec.value_dim],
            )
            gradients = gradients._replace(dq=dq, dk=dk, dv=dv)
    if dlse is not None and not native:
        gradients = _with_lse_gradient(kernel, wide, spec, inputs, out, lse, dlse, gradients)
    if spec.sinks:
        sum_sinks = kernel.sink_gradient or sink_gradient
        gradients = gradients._replace(dsinks=sum_sinks(inputs.sinks, out, lse, dout, dlse))
    return gradients


def whole_eights(dim: int) -> int:
    """Returns the head dimension that a kernel runs ``dim`` at: rows of whole 16 bytes in the smallest dtype."""
    return -(-dim // 8) * 8


def width_of(dim: int, widths: tuple[int, ...], built: tuple[int, ...], multiple: int = 8) -> int:
    """Returns the head dimension to run ``dim`` at: the next multiple, or the next width that the build has.

    Args:
        widths: of the package's kernels, ascending. built: those that the build has, () for all.
    """
    width = -(-dim // multiple) * multiple
    native = next((kernel for kernel in widths if kernel >= width), width)
    if not built or native in built:
        return width
    return next((kernel for kernel in built if kernel > width), width)


def by_kv_head(gradient: Tensor, kv_heads: int) -> Tensor:
    """``[batch, length, heads, dim]`` -> ``[batch, length, kv_heads, dim]``, summed in float32."""
    import torch

    heads = gradient.shape[2]
    if heads == kv_heads:
        return gradient
    groups = gradient.unflatten(2, (kv_heads, heads // kv_heads))
    return groups.sum(3, dtype=torch.float32).to(gradient.dtype)


def power_of_two(dim: int) -> int:
    """Returns the head dimension that Triton's matrix product runs ``dim`` at: a power of two from 16 on."""
    return max(16, 1 << (dim - 1).bit_length())


@lru_cache(maxsize=4096)
def _widened(kernel: Kernel, spec: AttentionSpec) -> AttentionSpec | None:
    """Returns the spec that the kernel runs instead, or None if it can run the call unchanged."""
    head_dim, value_dim = kernel.width(spec.head_dim), kernel.width(spec.value_dim)
    if kernel.same_width:
        head_dim = value_dim = kernel.width(max(spec.head_dim, spec.value_dim))
    if (head_dim, value_dim) == (spec.head_dim, spec.value_dim) and not spec.sinks:
        return None
    # Sinks join the softmax by its log-sum-exp.
    return replace(spec, head_dim=head_dim, value_dim=value_dim, sinks=False, return_lse=spec.return_lse or spec.sinks)


def _wide_inputs(wide: AttentionSpec, inputs: Inputs) -> Inputs:
    q, k, v = (padded(inputs.q, wide.head_dim), padded(inputs.k, wide.head_dim), padded(inputs.v, wide.value_dim))
    return inputs._replace(q=q, k=k, v=v, sinks=None)


def padded(tensor: Tensor, width: int) -> Tensor:
    """Returns ``[..., dim]`` as ``[..., width]``, with zeros appended; the tensor itself if it has this width."""
    import torch

    missing = width - tensor.shape[-1]
    return tensor if missing == 0 else torch.nn.functional.pad(tensor.detach(), (0, missing))


def _with_lse_gradient(
    kernel: Kernel,
    wide: AttentionSpec,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor,
    gradients: Gradients,
) -> Gradients:
    """Adds the gradient of the log-sum-exp to dq and dk, with one more forward and backward of the kernel."""
    import torch

    square = replace(wide, value_dim=wide.head_dim)
    keys = padded(inputs.k, square.head_dim)
    operands = _wide_inputs(wide, inputs)._replace(v=keys, bias=inputs.bias)
    # A, with the weights exp(s - kernel_lse). ``lse`` may include sinks, or belong to a whole row of which this call
    # sees a part; the factor exp(kernel_lse - lse) rescales the weights to it.
    mean_key, kernel_lse = kernel.forward(square, operands, None)
    empty = lse == -torch.inf
    scale: float = spec.scale  # type: ignore[assignment]  # every spec has set it
    factor = torch.exp(kernel_lse - lse).masked_fill(empty, 0.0) * dlse.masked_fill(empty, 0.0) * scale
    factor = by_row(factor)
    dq = gradients.dq + (mean_key[..., : spec.head_dim].to(factor.dtype) * factor)
    queries = padded(inputs.q, square.head_dim)
    weight = by_row(dlse.masked_fill(empty, 0.0)) * scale
    dout = (queries.to(factor.dtype) * weight).to(inputs.q.dtype)
    # Only dv is used, sum_i P_ij dout_i. It does not depend on out, so zeros serve.
    extra = kernel.backward(square, operands, torch.zeros_like(dout), lse, dout, None)
    dk = gradients.dk.to(factor.dtype) + extra.dv[..., : spec.head_dim].to(factor.dtype)
    return gradients._replace(dq=dq.to(gradients.dq.dtype), dk=dk.to(gradients.dk.dtype))


def by_row(values: Tensor) -> Tensor:
    """``[batch, heads, q_len]`` -> ``[batch, q_len, heads, 1]``; packed ``[heads, tokens]`` likewise."""
    return values.transpose(-1, -2)[..., None]


def with_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, *, needs_lse: bool = True, into: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Adds one logit per head, ``[heads]``, to the softmax of (out, lse). Rows that see no key keep 0 and -inf.

    Without ``needs_lse`` the returned log-sum-exp is the given one. into: a buffer for the new out.
    """
    import torch

    sinks = sinks.detach().to(lse.dtype)[:, None]  # [heads, 1] against [..., heads, rows]
    gate = (lse - sinks).sigmoid_().nan_to_num_()  # NaN if both are -inf
    # Every operation here is a small kernel, so the product is rounded by the kernel that computes it.
    into = torch.empty_like(out) if into is None else into
    out = torch.mul(out, by_row(gate), out=into)
    if not needs_lse:
        return out, lse
    return out, torch.logaddexp(lse, sinks).masked_fill_(lse == -torch.inf, -torch.inf)


def sink_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Returns the gradient of the sinks, ``[heads]``, from out and lse with sinks.

    A sink's weight in a row is exp(sink - lse); its logit's gradient is -weight * (delta - dlse). A row that sees no
    key adds nothing, whatever its dout is.
    """
    import torch

    share = torch.exp(sinks.detach().to(lse.dtype)[:, None] - lse)  # [heads, 1] against [..., heads, rows]
    delta = (dout.to(lse.dtype) * out).sum(-1).transpose(-1, -2)  # [..., heads, rows]
    total = (share * (delta if dlse is None else delta - dlse)).masked_fill(lse == -torch.inf, 0.0)
    rows = (0, 2) if total.dim() == 3 else (1,)
    return -total.sum(rows).to(sinks.dtype)
