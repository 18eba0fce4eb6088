"""Tensors on their way into torch's memory-efficient kernel and out of it: equal heads, padded rows, whole documents.

The kernel takes ``[batch, length, heads, dim]`` with as many kv heads as heads, and a batch of 1 where documents are
packed. ``how`` is what the backend's ``lower`` says. Nothing here synchronises.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.sdpa_efficient import documents as aten_documents
from attn_core.backends.sdpa_efficient.documents import Places
from attn_core.backends.shared import aten_masks
from attn_core.backends.shared.rewrites import readable
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

ROWS_OF_LSE = 32
"""The kernel pads the query axis of its log-sum-exp to a multiple of this, with +inf."""
ADDRESSES = 2**31
"""The kernel multiplies rows by strides in int32."""


class Operands(NamedTuple):
    """What the kernel is given; of dense calls the rows in ``how["rows"]``.

    ``empty``: which of the rows see no key, ``[batch or 1, heads or 1, rows or 1]``, None where all do; ``places``: of
    packed tokens.
    """

    q: Any
    k: Any
    v: Any
    bias: Any = None
    empty: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    places: Places | None = None


class Saved(NamedTuple):
    """The forward's results as the kernel's backward wants them."""

    out: Any
    lse: Any
    dout: Any


def operands(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs) -> Operands:
    """The kernel's tensors for a call."""
    q, k, v = (tensor[None] if spec.packed else tensor for tensor in inputs[:3])
    q = _addressable(q[:, how["rows"]])
    k, v = (for_each_head(_addressable(tensor), spec.group_size) for tensor in (k, v))
    if spec.packed:
        return _packed(spec, how, inputs, Operands(q, k, v))
    if inputs.mask is None and inputs.bias is None:
        return Operands(q, k, v)
    rows = how["rows"]
    added = aten_masks.in_rows(aten_masks.additive(inputs, q.dtype), rows)
    edge = aten_masks.needed_band(spec) if how["custom_mask_type"] else None
    bias = aten_masks.aligned(added, spec.kv_len).expand(spec.batch, spec.num_heads, rows.stop - rows.start, -1)
    return Operands(q, k, v, bias, aten_masks.empty_rows(added, edge, rows, spec.kv_len))


def _packed(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs, given: Operands) -> Operands:
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if how["split_documents"]:
        cu_q, cu_k = aten_documents.split_at_first_key(cu_q, cu_k)
    where = aten_documents.places(cu_q, cu_k, spec.q_len, _padded(how["max_q"]))
    return given._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, places=where)


def results(spec: AttentionSpec, how: dict[str, Any], given: Operands, out: Any, raw: Any) -> tuple[Any, Any]:
    """(out, lse) of the call from the kernel's out and its padded log-sum-exp."""
    import torch

    if given.places is not None:
        # Tokens without a key: the kernel may not have written them.
        out = out[0].masked_fill_(given.places.empty[:, None, None], 0.0)
        return out, aten_documents.by_token(raw, given.places)
    lse = raw[..., : given.q.shape[1]].contiguous()
    if given.empty is not None:
        lse = lse.masked_fill_(given.empty, -torch.inf)
    return _all_rows(spec, how, out), _all_rows(spec, how, lse[..., None], -torch.inf, axis=2)[..., 0]


def saved(spec: AttentionSpec, how: dict[str, Any], given: Operands, out: Any, lse: Any, dout: Any) -> Saved:
    """What the backward wants beside its operands: its own rows, and +inf (a weight of 0) for rows that see nothing."""
    import torch

    if given.places is not None:
        documents = given.cu_seqlens_q.shape[0] - 1
        raw = aten_documents.by_document(lse, given.places, documents, _padded(how["max_q"]))
        return Saved(out[None].contiguous(), raw, dout[None].contiguous())
    rows = how["rows"]
    lse = lse[..., rows]
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    missing = _padded(lse.shape[2]) - lse.shape[2]
    raw = torch.nn.functional.pad(lse, (0, missing), value=torch.inf).contiguous()
    return Saved(out[:, rows].contiguous(), raw, dout[:, rows].contiguous())


def gradients(spec: AttentionSpec, how: dict[str, Any], given: Operands, inputs: Inputs, found: Any) -> Gradients:
    """The call's gradients from the kernel's (dq, dk, dv, dbias)."""
    dq, dk, dv, dbias = found
    dk, dv = by_kv_head(dk, spec.num_kv_heads), by_kv_head(dv, spec.num_kv_heads)
    if given.places is not None:
        return Gradients(dq[0].masked_fill_(given.places.empty[:, None, None], 0.0), dk[0], dv[0])
    dq = _all_rows(spec, how, dq)
    if not spec.bias_gradient:
        return Gradients(dq, dk, dv)
    return Gradients(dq, dk, dv, bias_gradient(spec, how, inputs.bias, dbias))


def for_each_head(tensor: Any, group: int) -> Any:
    """``[batch, length, kv_heads, dim]`` -> ``[batch, length, heads, dim]``: a kv head for each head of its group."""
    if group == 1:
        return tensor
    batch, length, kv_heads, dim = tensor.shape
    # [batch, length, kv_heads, group, dim] -> [batch, length, heads, dim]; a view where there is one kv head
    return tensor[:, :, :, None].expand(batch, length, kv_heads, group, dim).reshape(batch, length, -1, dim)


def by_kv_head(gradient: Any, kv_heads: int) -> Any:
    """``[batch, length, heads, dim]`` -> ``[batch, length, kv_heads, dim]``, summed in float32."""
    import torch

    heads = gradient.shape[2]
    if heads == kv_heads:
        return gradient
    groups = gradient.unflatten(2, (kv_heads, heads // kv_heads))
    return groups.sum(3, dtype=torch.float32).to(gradient.dtype)


def bias_gradient(spec: AttentionSpec, how: dict[str, Any], bias: Any, full: Any) -> Any:
    """``[batch, heads, rows, kv_len]`` -> the bias's own shape and dtype; tiles that causal skipped hold anything."""
    import torch

    rows = how["rows"]
    if how["custom_mask_type"]:
        queries = torch.arange(rows.start, rows.stop, device=full.device)[:, None]
        seen = aten_masks.needed_band(spec).contains(queries, torch.arange(spec.kv_len, device=full.device))
        full = full.masked_fill_(~seen, 0.0)
    batch, heads, of_rows, keys = bias.shape
    if of_rows == 1:
        return full.sum_to_size((batch, heads, 1, keys)).to(bias.dtype)
    summed = full.sum_to_size((batch, heads, rows.stop - rows.start, keys))
    return _all_rows(spec, how, summed, axis=2).to(bias.dtype)


def _all_rows(spec: AttentionSpec, how: dict[str, Any], part: Any, value: float = 0.0, axis: int = 1) -> Any:
    """A 4-D tensor of some rows with all rows of the call; what the kernel was not given is ``value``."""
    import torch

    rows = how["rows"]
    around = rows.start, spec.q_len - rows.stop
    if around == (0, 0):
        return part
    return torch.nn.functional.pad(part, (0, 0) * (3 - axis) + around, value=value)


def _padded(rows: int) -> int:
    return -(-rows // ROWS_OF_LSE) * ROWS_OF_LSE


def _addressable(tensor: Any) -> Any:
    """A ``[batch, length, heads, dim]`` tensor that the kernel can read, or a copy that it can."""
    tensor = readable(tensor)
    return tensor if tensor.shape[1] * tensor.stride(1) < ADDRESSES else tensor.contiguous()
