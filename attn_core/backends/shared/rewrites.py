"""What a CUDA kernel lacks, done exactly around it: head widths, sinks, and the gradient of the log-sum-exp.

With P the softmax weights, A = sum_j P_j k_j and g the gradient of the log-sum-exp, by row:

    sinks      gate = sigmoid(lse - sink);  out' = gate * out;  lse' = log(exp(lse) + exp(sink)).
               A kernel's backward that is given (out', lse') computes with the weights exp(s - lse') and the row sum
               dout . out', and so is exact; dsink = -sum_rows (1 - gate) * (dout . out' - g).
    widths     zeros appended to q, k and v change neither scores nor log-sum-exp; the scale is always explicit.
    gradient   s_ij enters the log-sum-exp with weight P_ij: dq_i += scale * g_i * A_i, which is the kernel's forward
    of lse     with v = k; dk_j += scale * sum_i P_ij g_i q_i, which is the dv of its backward with dout = g * q.

The last holds where scores are ``scale * q . k`` plus constants: not under softcap. Rows that see no key have weight 0.
Source: the derivative of softmax attention; checked in float64 against the reference in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


class Kernel(NamedTuple):
    """A kernel's two halves, on tensors it takes as they are: head_dim == value_dim == a width it has, and no sinks.

    Attributes:
        forward: ``(spec, inputs, into) -> (out, lse)``; lse natural, float32, -inf for rows that see no key.
        backward: ``(spec, inputs, out, lse, dout, into) -> Gradients``, exact for whatever out and lse it is given.
        width: the head dimension that the kernel runs for one of this size.
        same_width: False when the kernel takes a value_dim of its own, so that v is padded apart from q and k.
        lse_gradient: backward takes a keyword ``dlse`` itself.
    """

    forward: Callable[[AttentionSpec, Inputs, Any], tuple[Any, Any]]
    backward: Callable[..., Gradients]
    width: Callable[[int], int]
    same_width: bool = True
    lse_gradient: bool = False

    def pads(self, spec: AttentionSpec) -> bool:
        """Whether the head dimensions of a call are not those that the kernel runs."""
        wide = _widened(self, replace(spec, sinks=False))
        return wide is not None and wide != spec


def refusals(spec: AttentionSpec) -> tuple[str, ...]:
    """What the rewrite of the log-sum-exp's gradient cannot do, for a kernel that has none of its own."""
    if not (spec.return_lse and spec.needs_backward):
        return ()
    asked = {
        f"softcap={spec.softcap}": spec.softcap is not None,
        f"dropout={spec.dropout}": spec.dropout > 0,
        "gradient of the bias": spec.bias_gradient,
    }
    what = "no gradient of the log-sum-exp of its own, and the rewrite that stands in for it has none with this"
    return tuple(f"return_lse with gradients and {name}: {what}" for name, used in asked.items() if used)


def forward(kernel: Kernel, spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
    """(out, lse) of any call, by a kernel that lacks the above; ``into`` as in ``Backend.forward``."""
    wide = _widened(kernel, spec)
    if wide is None:
        return kernel.forward(spec, inputs, into)
    out, lse = kernel.forward(wide, _wide_inputs(wide, inputs), None if spec.sinks or _pads_out(spec, wide) else into)
    if _pads_out(spec, wide):
        out = out[..., : spec.value_dim]
    return with_sinks(out, lse, inputs.sinks) if spec.sinks else (out, lse)


def backward(
    kernel: Kernel, spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any, into: Any = None
) -> Gradients:
    """The gradients of any call, from the out and lse that ``forward`` gave; ``into`` as in ``Backend.backward``."""
    wide = _widened(kernel, spec)
    native = {"dlse": dlse} if kernel.lse_gradient and dlse is not None else {}
    if wide is None:
        wide, found = spec, kernel.backward(spec, inputs, out, lse, dout, into, **native)
    else:
        padded = (wide.head_dim, wide.value_dim) != (spec.head_dim, spec.value_dim)
        saved = (_padded(out, wide.value_dim), lse, _padded(dout, wide.value_dim))
        found = kernel.backward(wide, _wide_inputs(wide, inputs), *saved, None if padded else into, **native)
        if padded:
            dq, dk, dv = found.dq[..., : spec.head_dim], found.dk[..., : spec.head_dim], found.dv[..., : spec.value_dim]
            found = found._replace(dq=dq, dk=dk, dv=dv)
    if dlse is not None and not native:
        found = _with_lse_gradient(kernel, wide, spec, inputs, out, lse, dlse, found)
    if spec.sinks:
        found = found._replace(dsinks=sink_gradient(inputs.sinks, out, lse, dout, dlse))
    return found


def readable(tensor: Any) -> Any:
    """The tensor, or a contiguous copy where a kernel could not read it.

    Kernels copy 16 bytes at a time: the last axis must be dense, and every other stride and the address a multiple of
    16 bytes. An axis that was expanded (stride 0) is copied as well.
    """
    size = tensor.element_size()
    if tensor.is_contiguous() and not tensor.shape[-1] * size % 16 and not tensor.data_ptr() % 16:
        return tensor  # what nearly every call has, told in half the time
    strides = tensor.stride()
    if strides[-1] != 1 or tensor.data_ptr() % 16:
        return tensor.contiguous() if strides[-1] != 1 else tensor.clone(memory_format=_contiguous())
    for length, stride in zip(tensor.shape[:-1], strides[:-1], strict=True):
        if length > 1 and (stride <= 0 or stride * size % 16):
            return tensor.clone(memory_format=_contiguous())
    return tensor


def writable(buffer: Any) -> Any:
    """A buffer, or None, that a kernel can write into as it can read it; else None."""
    return buffer if buffer is not None and readable(buffer) is buffer else None


def _contiguous() -> Any:
    import torch

    return torch.contiguous_format


@lru_cache(maxsize=4096)
def _widened(kernel: Kernel, spec: AttentionSpec) -> AttentionSpec | None:
    """The spec that the kernel is given instead, or None where it can run the call as it is."""
    head_dim, value_dim = kernel.width(spec.head_dim), kernel.width(spec.value_dim)
    if kernel.same_width:
        head_dim = value_dim = kernel.width(max(spec.head_dim, spec.value_dim))
    if (head_dim, value_dim) == (spec.head_dim, spec.value_dim) and not spec.sinks:
        return None
    return replace(spec, head_dim=head_dim, value_dim=value_dim, sinks=False)


def _pads_out(spec: AttentionSpec, wide: AttentionSpec) -> bool:
    return wide.value_dim != spec.value_dim


def _wide_inputs(wide: AttentionSpec, inputs: Inputs) -> Inputs:
    q, k, v = (_padded(inputs.q, wide.head_dim), _padded(inputs.k, wide.head_dim), _padded(inputs.v, wide.value_dim))
    return inputs._replace(q=q, k=k, v=v, sinks=None)


def _padded(tensor: Any, width: int) -> Any:
    """``[..., dim]`` -> ``[..., width]`` with zeros behind."""
    import torch

    missing = width - tensor.shape[-1]
    return tensor if missing == 0 else torch.nn.functional.pad(tensor.detach(), (0, missing))


def _by_row(values: Any) -> Any:
    """``[batch, heads, q_len]`` -> ``[batch, q_len, heads, 1]``; packed ``[heads, tokens]`` likewise."""
    return values.transpose(-1, -2)[..., None]


def _by_head(values: Any) -> Any:
    """One value per head, ``[heads]``, beside ``[..., heads, rows]``."""
    return values[:, None]


def with_sinks(out: Any, lse: Any, sinks: Any) -> tuple[Any, Any]:
    """(out, lse) of the softmax with one logit ``[heads]`` more; a row that sees no key keeps its 0 and -inf."""
    import torch

    sinks = _by_head(sinks.detach().to(lse.dtype))
    empty = lse == -torch.inf
    gate = torch.sigmoid(lse - sinks).masked_fill(empty, 0.0)  # a sink of -inf makes it NaN there
    out = (out.to(lse.dtype) * _by_row(gate)).to(out.dtype)
    return out, torch.logaddexp(lse, sinks).masked_fill(empty, -torch.inf)


def sink_gradient(sinks: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Any:
    """``[heads]``: a sink's weight in a row is exp(sink - lse'), its logit's gradient -weight * (delta - dlse).

    A row that sees no key adds nothing, whatever its dout is.
    """
    import torch

    share = torch.exp(_by_head(sinks.detach().to(lse.dtype)) - lse)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(-1, -2)  # [..., heads, rows]
    total = (share * (delta if dlse is None else delta - dlse)).masked_fill(lse == -torch.inf, 0.0)
    rows = (0, 2) if total.dim() == 3 else (1,)
    return -total.sum(rows).to(sinks.dtype)


def _with_lse_gradient(
    kernel: Kernel,
    wide: AttentionSpec,
    spec: AttentionSpec,
    inputs: Inputs,
    out: Any,
    lse: Any,
    dlse: Any,
    found: Gradients,
) -> Gradients:
    """Adds what ``dlse`` gives dq and dk: one more forward and one more backward of the kernel."""
    import torch

    square = replace(wide, value_dim=wide.head_dim)
    keys = _padded(inputs.k, square.head_dim)
    asked = _wide_inputs(wide, inputs)._replace(v=keys, bias=inputs.bias)
    mean_key, own_lse = kernel.forward(square, asked, None)  # A, with the weights exp(s - own_lse)
    empty = lse == -torch.inf
    factor = torch.exp(own_lse - lse).masked_fill(empty, 0.0) * dlse.masked_fill(empty, 0.0) * spec.scale
    factor = _by_row(factor)
    dq = found.dq + (mean_key[..., : spec.head_dim].to(factor.dtype) * factor)
    queries = _padded(inputs.q, square.head_dim)
    weight = _by_row(dlse.masked_fill(empty, 0.0)) * spec.scale
    behind = (queries.to(factor.dtype) * weight).to(inputs.q.dtype)
    more = kernel.backward(square, asked, torch.zeros_like(behind), lse, behind, None)
    dk = found.dk.to(factor.dtype) + more.dv[..., : spec.head_dim].to(factor.dtype)
    return found._replace(dq=dq.to(found.dq.dtype), dk=dk.to(found.dk.dtype))
