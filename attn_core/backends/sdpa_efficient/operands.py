"""Converts operands and results for torch's memory-efficient kernel: equal heads, padded rows, whole documents.

The kernel takes ``[batch, length, heads, dim]`` with as many kv heads as heads, and a batch of 1 for packed documents.
``how`` is the result of the backend's ``lower``. No function synchronises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared import aten_masks
from attn_core.backends.shared.readable import readable, whole_vectors
from attn_core.backends.shared.rewrites import by_kv_head
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

ROWS_OF_LSE = 32
"""The kernel pads the query axis of its log-sum-exp to a multiple of this, with +inf."""
ADDRESSES = 2**31
"""The kernel multiplies rows by strides in int32."""


class KernelOperands(NamedTuple):
    """The kernel's operands; of dense calls only the rows ``how["rows"]``.

    ``empty``: which of the rows see no key, ``[batch or 1, heads or 1, rows or 1]``, None if every row sees one.
    ``places``: of packed tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Any = None
    empty: Tensor | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Tensor | None = None
    places: QueryTokens | None = None


class BackwardOperands(NamedTuple):
    """The forward's results and dout in the layouts of the kernel's backward."""

    out: Tensor
    lse: Tensor
    dout: Tensor


def operands(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs) -> KernelOperands:
    """Returns the kernel's operands for a call."""
    import torch

    q, k, v = (tensor[None] if spec.packed else tensor for tensor in inputs[:3])
    q = readable(q[:, how["rows"]], is_addressable)
    k, v = (for_each_head(readable(tensor, is_addressable), spec.group_size) for tensor in (k, v))
    if spec.packed:
        return _packed(spec, how, inputs, KernelOperands(q, k, v))
    if inputs.mask is None and inputs.bias is None:
        return KernelOperands(q, k, v)
    rows = how["rows"]
    part = inputs._replace(
        mask=aten_masks.in_rows(inputs.mask, rows), bias=aten_masks.in_rows(aten_masks.detached(inputs.bias), rows)
    )
    bias = aten_masks.additive(part.mask, part.bias, q.dtype, spec.kv_len)
    # The kernel applies causal itself, so a row is empty if band and mask together hide all its keys.
    edge = aten_masks.needed_band(spec) if how["custom_mask_type"] else None
    empty = aten_masks.empty_rows(part.mask if part.bias is None else bias != -torch.inf, edge, rows, spec.kv_len)
    return KernelOperands(q, k, v, bias.expand(spec.batch, spec.num_heads, rows.stop - rows.start, -1), empty)


def added_of(spec: AttentionSpec) -> Callable[[Tensor | None, Tensor | None], Tensor]:
    """Returns a function of mask and bias: the kernel's bias of all rows, which autograd can differentiate."""
    table = aten_masks.additive_of(spec, spec.dtype)
    full = spec.batch, spec.num_heads, spec.q_len, spec.kv_len
    if full in (spec.bias_shape, spec.mask_shape):
        return table
    return lambda mask, bias: table(mask, bias).expand(full)


def _packed(spec: AttentionSpec, how: dict[str, Any], inputs: Inputs, dense: KernelOperands) -> KernelOperands:
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if how["split_documents"]:
        cu_q, cu_k = split_at_first_key(cu_q, cu_k)
    where = places(cu_q, cu_k, spec.q_len, _padded(how["max_q"]))
    return dense._replace(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, places=where)


def results(
    spec: AttentionSpec, how: dict[str, Any], operands: KernelOperands, out: Tensor, raw: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of the call from the kernel's out and its padded log-sum-exp."""
    import torch

    if operands.places is not None:
        # The kernel may not have written tokens without a key.
        out = out[0].masked_fill_(operands.places.empty[:, None, None], 0.0)
        return out, by_token(raw, operands.places)
    lse = raw[..., : operands.q.shape[1]].contiguous()
    if operands.empty is not None:
        lse = lse.masked_fill_(operands.empty, -torch.inf)
    return _all_rows(spec, how, out), _all_rows(spec, how, lse[..., None], -torch.inf, axis=2)[..., 0]


def backward_operands(
    spec: AttentionSpec, how: dict[str, Any], operands: KernelOperands, out: Tensor, lse: Tensor, dout: Tensor
) -> BackwardOperands:
    """Returns the saved tensors for the backward: the kernel's rows, +inf (a weight of 0) for rows without a key."""
    import torch

    if operands.places is not None:
        documents = operands.cu_seqlens_q.shape[0] - 1
        raw = by_document(lse, operands.places, documents, _padded(how["max_q"]))
        return BackwardOperands(out[None].contiguous(), raw, dout[None].contiguous())
    rows = how["rows"]
    lse = lse[..., rows]
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    missing = _padded(lse.shape[2]) - lse.shape[2]
    raw = torch.nn.functional.pad(lse, (0, missing), value=torch.inf).contiguous()
    return BackwardOperands(out[:, rows].contiguous(), raw, dout[:, rows].contiguous())


def gradients(
    spec: AttentionSpec,
    how: dict[str, Any],
    operands: KernelOperands,
    inputs: Inputs,
    raw: tuple[Tensor, Tensor, Tensor, Tensor | None],
) -> Gradients:
    """Returns the call's gradients from the kernel's (dq, dk, dv, dbias)."""
    dq, dk, dv, dbias = raw
    dk, dv = by_kv_head(dk, spec.num_kv_heads), by_kv_head(dv, spec.num_kv_heads)
    if operands.places is not None:
        return Gradients(dq[0].masked_fill_(operands.places.empty[:, None, None], 0.0), dk[0], dv[0])
    dq = _all_rows(spec, how, dq)
    if not spec.bias_gradient:
        return Gradients(dq, dk, dv)
    return Gradients(dq, dk, dv, bias_gradient(spec, how, inputs.bias, dbias))  # type: ignore[arg-type]


def for_each_head(tensor: Tensor, group: int) -> Tensor:
    """Repeats kv heads: ``[batch, length, kv_heads, dim]`` -> ``[batch, length, heads, dim]``."""
    if group == 1:
        return tensor
    batch, length, kv_heads, dim = tensor.shape
    # [batch, length, kv_heads, group, dim] -> [batch, length, heads, dim]; a view if there is one kv head
    return tensor[:, :, :, None].expand(batch, length, kv_heads, group, dim).reshape(batch, length, -1, dim)


def bias_gradient(spec: AttentionSpec, how: dict[str, Any], bias: Tensor, full: Tensor) -> Tensor:
    """``[batch, heads, rows, kv_len]`` -> the bias's shape and dtype. Zeroes the tiles that causal left unwritten."""
    import torch

    rows = how["rows"]
    if how["custom_mask_type"]:
        queries = torch.arange(rows.start, rows.stop, device=full.device)[:, None]
        seen = aten_masks.needed_band(spec).contains(queries, torch.arange(spec.kv_len, device=full.device))
        full = full.masked_fill_(~seen, 0.0)
    batch, heads, bias_rows, keys = bias.shape
    if bias_rows == 1:
        return full.sum_to_size((batch, heads, 1, keys)).to(bias.dtype)
    summed = full.sum_to_size((batch, heads, rows.stop - rows.start, keys))
    return _all_rows(spec, how, summed, axis=2).to(bias.dtype)


def _all_rows(spec: AttentionSpec, how: dict[str, Any], part: Tensor, value: float = 0.0, axis: int = 1) -> Tensor:
    """Pads a 4-D tensor of the kernel's rows to all rows of the call with ``value``."""
    import torch

    rows = how["rows"]
    around = rows.start, spec.q_len - rows.stop
    if around == (0, 0):
        return part
    return torch.nn.functional.pad(part, (0, 0) * (3 - axis) + around, value=value)


def _padded(rows: int) -> int:
    return -(-rows // ROWS_OF_LSE) * ROWS_OF_LSE


def is_addressable(tensor: Tensor) -> bool:
    """Returns whether the kernel can read a ``[batch, length, heads, dim]`` tensor."""
    # Views of wide rows, as of one packed projection, have strides that reach further than the tensor's own elements.
    near = tensor.shape[1] * tensor.stride(1) < ADDRESSES or tensor.is_contiguous()
    return near and whole_vectors(tensor)


class QueryTokens(NamedTuple):
    """Each token's document and position in it (int64 ``[tokens]``), and whether the document has no key."""

    document: Tensor
    position: Tensor
    empty: Tensor


def split_at_first_key(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """Splits each document in two: the queries without a key, then the rest. Returns two int32 ``[2 * documents + 1]``.

    In a document with more queries than keys, bottom-right causal leaves the first ``queries - keys`` without a key.
    The kernel is wrong there (it stores the negative distance unsigned: pytorch#193632). Split into a separate document
    without keys they are harmless, and the remaining document has as many queries as keys.
    """
    import torch

    starts_q, starts_k = cu_seqlens_q[:-1], cu_seqlens_k[:-1]
    without = ((cu_seqlens_q[1:] - starts_q) - (cu_seqlens_k[1:] - starts_k)).clamp(min=0)
    # [documents, 2] -> [2 * documents]: each document's start, and the start of its queries that see a key
    queries = torch.stack((starts_q, starts_q + without), dim=1).flatten()
    keys = torch.stack((starts_k, starts_k), dim=1).flatten()
    return torch.cat((queries, cu_seqlens_q[-1:])), torch.cat((keys, cu_seqlens_k[-1:]))


def places(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, tokens: int, longest: int) -> QueryTokens:
    """Locates ``tokens`` query tokens in documents of at most ``longest`` queries."""
    import torch

    at = torch.arange(tokens, device=cu_seqlens_q.device, dtype=cu_seqlens_q.dtype)  # searchsorted needs equal dtypes
    # Clamps keep every index valid even if the offsets are wrong.
    document = torch.searchsorted(cu_seqlens_q[1:], at, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    position = (at - cu_seqlens_q[document]).clamp(0, longest - 1).long()
    empty = cu_seqlens_k[document + 1] == cu_seqlens_k[document]
    return QueryTokens(document, position, empty)


def by_token(raw: Tensor, where: QueryTokens) -> Tensor:
    """``[documents, heads, longest]`` -> ``[heads, tokens]``, -inf for tokens without a key."""
    import torch

    lse = raw.transpose(0, 1)[:, where.document, where.position]
    return lse.masked_fill(where.empty, -torch.inf)


def by_document(lse: Tensor, where: QueryTokens, documents: int, longest: int) -> Tensor:
    """``[heads, tokens]`` -> ``[documents, heads, longest]``, +inf (a weight of 0) for padding and rows with no key."""
    import torch

    raw = lse.new_full((documents, lse.shape[0], longest), torch.inf)
    raw[where.document, :, where.position] = lse.masked_fill(lse == -torch.inf, torch.inf).t()
    return raw
