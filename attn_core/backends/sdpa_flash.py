"""torch's own flash attention, as scaled_dot_product_attention uses it: the aten CPU flash kernel.

Limits: no softcap, ALiBi, sinks or dropout; value_dim == head_dim; no gradient of a bias or of the log-sum-exp. Causal
is top-left in the kernel. Windows, bottom-right causal with unequal lengths, masks and biases become one additive mask,
built per call and bounded by MASK_LIMIT (by its own lengths for a packed document whose queries and keys differ in
number). Packed documents run one after another, so that nothing crosses between them.
Upstream: ``aten::_scaled_dot_product_flash_attention_for_cpu``, torch 2.11 to 2.15. The raw op reads wrong memory when
the last stride is not 1, and reports a log-sum-exp of 0 for rows that see nothing: both are put right here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from attn_core.backends import Gradients, Inputs
from attn_core.masks import band
from attn_core.packed import dense_inputs, dense_spec, documents
from attn_core.spec import DTYPES, AttentionSpec
from attn_core.support import Build, Support

FRAMEWORK = "torch"
REQUIRES = "torch>=2.11"

FORWARD = Support(
    kernel="the aten CPU flash kernel",
    devices=("cpu",),
    dtypes=DTYPES,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    mask=True,
    bias=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
)
BACKWARD = replace(FORWARD)

MASK_LIMIT = 2**26
"""Elements of the additive mask that stands in for what the kernel lacks; 256 MiB in float32."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """A stand-in mask that would not fit its bound."""
    elements = _mask_elements(spec)
    if elements <= MASK_LIMIT:
        return ()
    what = "mask or bias" if spec.mask_shape or spec.bias_shape else f"causal={spec.causal}, window={spec.window}"
    return (
        f"{what} with q_len {spec.q_len} and kv_len {spec.kv_len}: the aten CPU flash kernel needs an additive mask "
        f"of {elements} elements, more than {MASK_LIMIT}",
    )


def probe() -> str:
    """torch's version, once the ops are there."""
    import torch

    _kernels()
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """``is_causal`` where the kernel's own top-left causal is what the spec means, else ``additive_mask``."""
    edge = band(spec)
    explicit = spec.mask_shape is not None or spec.bias_shape is not None
    plain = edge.left is None and edge.right is None
    native = edge.left is None and edge.right == 0 and edge.offset == 0
    hidden = not plain and not edge.hides_nothing(spec.q_len, spec.kv_len)
    is_causal = hidden and native and not explicit
    return {
        "is_causal": is_causal,
        "additive_mask": explicit or (hidden and not is_causal),
        "scale": spec.scale,
        "by_document": spec.packed,
    }


@cache
def _kernels() -> tuple[Any, Any]:
    import torch

    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return torch._scaled_dot_product_flash_attention_for_cpu, backward_op


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    how = lower(spec)
    if how["by_document"]:
        return _forward_packed(spec, inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        q, k, v = _readable(q), _readable(k), _readable(v)
    mask = _additive_mask(spec, inputs) if how["additive_mask"] else None
    # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
    out, lse = _kernels()[0](
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        0.0,
        how["is_causal"],
        attn_mask=mask,
        scale=how["scale"],
    )
    if mask is not None:
        lse = lse.masked_fill((mask == -float("inf")).all(dim=-1), -float("inf"))
    return out.transpose(1, 2), lse


def shortcut(spec: AttentionSpec) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
    """See ``Backend.shortcut``: torch itself attaches the backward op below to this forward op."""
    how = lower(spec)
    if how["by_document"] or how["additive_mask"]:
        return None
    kernel, is_causal, scale = _kernels()[0], how["is_causal"], how["scale"]

    def run(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = _readable(q), _readable(k), _readable(v)
        out, lse = kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), 0.0, is_causal, scale=scale)
        return out.transpose(1, 2), lse

    return run


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    how = lower(spec)
    if how["by_document"]:
        return _backward_packed(spec, inputs, out, lse, dout)
    q, k, v = inputs.q, inputs.k, inputs.v
    if not (dout.is_contiguous() and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
        dout, q, k, v = _readable(dout), _readable(q), _readable(k), _readable(v)
    mask = None
    if how["additive_mask"]:
        mask = _additive_mask(spec, inputs)
        lse = lse.masked_fill(lse == -float("inf"), 0.0)  # what the kernel itself reports for such a row
    dq, dk, dv = _kernels()[1](
        dout.transpose(1, 2),
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        out.transpose(1, 2),
        lse,
        0.0,
        how["is_causal"],
        attn_mask=mask,
        scale=how["scale"],
    )
    return Gradients(dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))


def _readable(tensor: Any) -> Any:
    """A ``[batch, seq, heads, dim]`` tensor whose rows the kernel can read; a copy only where it cannot."""
    batch_stride, seq_stride, head_stride, last_stride = tensor.stride()
    width = tensor.shape[3]
    if last_stride != 1 or min(seq_stride, head_stride) < width or batch_stride < 1:
        return tensor.contiguous()
    return tensor


def _mask_elements(spec: AttentionSpec) -> int:
    if spec.packed:
        heads = max((shape[1] for shape in (spec.mask_shape, spec.bias_shape) if shape), default=1)
        edge = band(spec)
        # Causal alone is the kernel's own where it is top-left, or a document's queries are as many as its keys.
        own = edge.right is None or (
            edge.right == 0 and (spec.alignment == "top_left" or spec.max_len_q == spec.max_len_k)
        )
        bare = edge.left is None and own and not spec.mask_shape and not spec.bias_shape
        return 0 if bare else heads * (spec.max_len_q or 0) * (spec.max_len_k or 0)
    if not lower(spec)["additive_mask"]:
        return 0
    shapes = [shape for shape in (spec.mask_shape, spec.bias_shape) if shape] + [(1, 1, spec.q_len, spec.kv_len)]
    batch, heads = (max(shape[axis] for shape in shapes) for axis in (0, 1))
    return batch * heads * spec.q_len * spec.kv_len


def _additive_mask(spec: AttentionSpec, inputs: Inputs) -> Any:
    """Bias, mask and band as one additive mask ``[batch or 1, heads or 1, q_len, kv_len]``: -inf is hidden."""
    import torch

    dtype = inputs.q.dtype if inputs.q.dtype == torch.float64 else torch.float32
    added = torch.zeros((), dtype=dtype) if inputs.bias is None else inputs.bias.to(dtype)
    rows, columns = torch.arange(spec.q_len)[:, None], torch.arange(spec.kv_len)[None, :]
    seen = band(spec).contains(rows, columns)
    if inputs.mask is not None:
        seen = inputs.mask & seen
    if seen is not True:
        added = torch.where(seen, added, -torch.inf)
    shape = torch.broadcast_shapes(added.shape, (1, 1, spec.q_len, spec.kv_len))
    return added.expand(shape)


def _documents(spec: AttentionSpec, inputs: Inputs) -> list[tuple[AttentionSpec, Inputs, slice, slice]]:
    """Each document as a dense call of its own, with views of its tokens."""
    return [
        (dense_spec(spec, *document.lengths), dense_inputs(inputs, document), *document)
        for document in documents(spec, inputs.cu_seqlens_q.numpy(), inputs.cu_seqlens_k.numpy())
    ]


def _forward_packed(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    out = inputs.q.new_zeros(spec.out_shape)
    lse = inputs.q.new_full(spec.lse_shape, float("-inf"), dtype=_lse_dtype(inputs.q))
    for document, tensors, rows, _ in _documents(spec, inputs):
        part, part_lse = forward(document, tensors)
        out[rows] = part[0]
        lse[:, rows] = part_lse[0]
    return out, lse


def _backward_packed(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any) -> Gradients:
    import torch

    dq, dk, dv = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in inputs[:3])
    for document, tensors, rows, columns in _documents(spec, inputs):
        saved = (out[rows][None], lse[:, rows][None], dout[rows][None])
        part = backward(document, tensors, *saved, None)
        dq[rows], dk[columns], dv[columns] = part.dq[0], part.dk[0], part.dv[0]
    return Gradients(dq, dk, dv)


def _lse_dtype(q: Any) -> Any:
    import torch

    return torch.float64 if q.dtype == torch.float64 else torch.float32
