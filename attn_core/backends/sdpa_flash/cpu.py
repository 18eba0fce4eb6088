"""torch's own flash attention, as scaled_dot_product_attention uses it: the aten CPU flash kernel.

Limits: no softcap or dropout; value_dim == head_dim; no gradient of a bias or of the log-sum-exp. Causal is top-left in
the kernel. Windows, bottom-right causal with unequal lengths, masks, biases and ALiBi become additive masks of blocks
of queries (``cpu_blocks.py``), for which ``containment.py`` contains NaN in hidden keys. Sinks scale the results.
Packed documents run one after another, those of equal lengths as one batch, so that nothing crosses between them.
The raw op of torch 2.11 to 2.15, ``aten::_scaled_dot_product_flash_attention_for_cpu``, reads wrong memory if the last
stride is not 1, and reports a log-sum-exp of 0 for rows that see no key. This file corrects both.
It promises no ``invariant``: the library below adds in another order for another alignment or number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any

from attn_core.backends.sdpa_flash import additive_masks, containment, cpu_blocks, cpu_kernel, cpu_packed, cpu_paged
from attn_core.backends.sdpa_flash.cpu_readable import all_readable, readable, readable_heads
from attn_core.backends.shared import sinks
from attn_core.backends.support import Build, Support
from attn_core.call.large_logits import LARGE_LSE, may_be_large
from attn_core.call.masks import band
from attn_core.call.pages import BITS
from attn_core.call.spec import DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

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
    alibi=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    paged=True,
    paged_alibi=True,
    paged_starts=True,
    page_dtypes=tuple(BITS),
)
BACKWARD = replace(FORWARD, paged=False, paged_alibi=False, paged_starts=False, page_dtypes=())


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses slopes of each sequence in pages."""
    if spec.paged is not None and len(spec.alibi_shape or ()) == 2:
        return (f"alibi_slopes of shape {list(spec.alibi_shape or ())}: {FORWARD.kernel} takes [heads] with pages",)
    return ()


def probe() -> str:
    """Checks that the ops exist and returns torch's version."""
    import torch

    cpu_kernel.kernels()
    return torch.__version__


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments: ``is_causal`` if the kernel's top-left causal fits, else ``additive_mask``.

    ``contained`` is whether NaN in hidden keys is contained, and ``by_results`` whether the results show it.
    """
    edge = band(spec)
    explicit = any(shape is not None for shape in (spec.mask_shape, spec.bias_shape, spec.alibi_shape))
    plain = edge.left is None and edge.right is None
    native = edge.left is None and edge.right == 0 and edge.offset == 0  # the kernel's causal is top-left
    hidden = not plain and not edge.hides_nothing(spec.q_len, spec.kv_len)
    is_causal = hidden and native and not explicit
    additive_mask = explicit or (hidden and not is_causal)
    return {
        "is_causal": is_causal,
        "additive_mask": additive_mask,
        "contained": additive_mask or (is_causal and spec.sinks),
        "by_results": containment.shows_in_results(spec),
        "scale": spec.scale,
        "by_document": spec.packed,
    }


def forward(spec: AttentionSpec, inputs: Any) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    if spec.paged is not None:
        return cpu_paged.forward(spec, inputs, forward)
    how = lower(spec)
    if how["by_document"]:
        return cpu_packed.forward(spec, inputs, forward)
    inputs = all_readable(inputs)
    if how["additive_mask"]:
        out, lse = cpu_blocks.forward(spec, inputs)
    else:
        # [batch, seq, heads, dim] -> [batch, heads, seq, dim] and back, as views
        q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])
        if spec.q_len == 1:  # else not: the lookup of an op hashes the spec on every call
            out, lse = cpu_kernel.forward_op(spec, how["is_causal"])(q, k, v)
        else:
            out, lse = cpu_kernel.kernels()[0](q, k, v, 0.0, how["is_causal"], scale=how["scale"])
        out = out.transpose(1, 2)
    if spec.sinks:
        out, lse = sinks.with_sinks(out, lse, inputs.sinks)
    if how["contained"]:
        containment.contain(spec, inputs, out, lse, how["by_results"])
    return out, lse


def shortcut(spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None] | None:
    """See ``contract.shortcut``: torch itself attaches the backward op below to this forward op."""
    how = lower(spec)
    if how["by_document"]:
        return None
    if how["additive_mask"]:
        return _masked_shortcut(spec)
    op = cpu_kernel.forward_op(spec, how["is_causal"])

    def run(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):  # nearly never: a cheap test first
            q, k, v = readable(q), readable(k), readable(v)
        out, lse = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return out.transpose(1, 2), lse

    def heads_first(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return op(readable_heads(q), readable_heads(k), readable_heads(v))

    run.heads_first = heads_first  # type: ignore[attr-defined]
    return run


def paged_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None]:
    """See ``contract.paged_shortcut``."""
    return cpu_paged.decoder(spec, spec.return_lse)


def _masked_shortcut(spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None] | None:
    """Returns the shortcut of a call with an additive mask; None if it needs more than one call of the kernel."""
    import torch

    blocks = cpu_blocks.blocks(spec)
    if len(blocks) != 1 or not blocks[0].whole:
        return None
    rows, keys, edge, _ = blocks[0]
    op, dtype, wants_lse = cpu_kernel.forward_op(spec), spec.lse_dtype, spec.return_lse
    by_results, learns = containment.shows_in_results(spec), spec.needs_backward and may_be_large(spec)
    size = torch.linalg.vector_norm  # here and not in a function, for small calls

    def run(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None) -> tuple[Any, Any] | None:
        if not (q.is_contiguous() and k.is_contiguous() and v.is_contiguous()):
            q, k, v = readable(q), readable(k), readable(v)
        if not (by_results or containment.are_finite(k, v)):
            return None
        added = additive_masks.additive(dtype, q.device, mask, bias, edge, rows, keys)
        out, lse = op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=added)
        if by_results and not containment.are_results_finite(out, lse):
            return None
        if learns and not size(lse, inf).item() < LARGE_LSE:
            return None
        if wants_lse:
            lse = lse.masked_fill(additive_masks.empty_rows(added), -float("inf"))
        return out.transpose(1, 2), lse

    def heads_first(q: Any, k: Any, v: Any, mask: Any = None, bias: Any = None) -> tuple[Any, Any] | None:
        if wants_lse or not (by_results or containment.are_finite(k, v)):
            return None
        added = additive_masks.additive(dtype, q.device, mask, bias, edge, rows, keys)
        out, lse = op(readable_heads(q), readable_heads(k), readable_heads(v), attn_mask=added)
        if by_results and not containment.are_results_finite(out, lse):
            return None
        if learns and not size(lse, inf).item() < LARGE_LSE:
            return None
        return out, lse

    run.heads_first = heads_first  # type: ignore[attr-defined]
    return run


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    how = lower(spec)
    if how["by_document"]:
        return cpu_packed.backward(spec, inputs, out, lse, dout, backward)
    inputs, dout = all_readable(inputs), readable(dout)
    large = containment.large_queries(spec, lse) if how["additive_mask"] else None
    if how["additive_mask"]:
        shown = lse if large is None else lse.masked_fill(large[:, None], inf)  # the weights exp(score - inf) are 0
        dq, dk, dv = cpu_blocks.backward(spec, inputs, out, shown, dout)
    else:
        tensors = (tensor.transpose(1, 2) for tensor in (dout, *inputs[:3], out))
        gradients = cpu_kernel.kernels()[1](*tensors, lse, 0.0, how["is_causal"], scale=how["scale"])
        dq, dk, dv = (gradient.transpose(1, 2) for gradient in gradients)
    if how["contained"]:
        containment.contain_gradients(spec, inputs, out, lse, dout, (dq, dk, dv), large)
    dsinks = sinks.sink_gradient(inputs.sinks, out, lse, dout, None) if spec.sinks else None
    return Gradients(dq, dk, dv, dsinks=dsinks)
