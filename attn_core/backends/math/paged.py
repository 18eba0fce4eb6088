"""Gathers paged keys and values into dense tensors and computes plain attention on them."""

from __future__ import annotations

from typing import Any

from attn_core.backends.math import fixed_tiles
from attn_core.backends.shared.pages.as_dense import dense_rows, packed_documents
from attn_core.backends.shared.pages.pools import query_offsets
from attn_core.backends.shared.pages.quantised import in_pages
from attn_core.backends.shared.parts.split_documents import documents_between
from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.call.key_ranges import contains
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs


def forward(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Any, Any]:
    """Returns (out, lse) of a paged call.

    On the CPU the sequences become packed documents of their own lengths. On a GPU reading the lengths would
    synchronise: each row is as long as the table is wide, and a mask hides the rest. So do rows with slopes of their
    own.
    """
    if spec.invariant is not None:
        packed, documents = packed_documents(spec, inputs)
        out, lse = fixed_tiles.forward(packed, documents)
        return out.to(inputs.q.dtype), lse
    if inputs.q.device.type != "cpu" or len(spec.alibi_shape or ()) == 2:  # documents have one slope per head
        return _as_dense_rows(spec, inputs)
    packed, documents = packed_documents(spec, inputs)
    valid_documents = documents_between(documents.cu_seqlens_q, documents.cu_seqlens_k)  # the tables are checked
    out, lse = plain_attention.forward(packed, documents, valid_documents)
    return out.to(inputs.q.dtype), lse


def _as_dense_rows(spec: AttentionSpec, inputs: PagedInputs) -> tuple[Any, Any]:
    """Runs the call as one dense row per sequence, for tables on a device. Clamps page numbers and lengths."""
    import torch

    paged = spec.paged
    assert paged is not None
    rows, device = min(spec.max_len_q or spec.q_len, spec.q_len), inputs.q.device
    lengths = inputs.seq_lens.clamp(0, paged.capacity)
    pages = inputs.block_table.clamp(0, paged.num_pages - 1).long()
    key = torch.arange(paged.capacity, device=device)
    valid = key < lengths[:, None]  # [batch, capacity]
    if inputs.kv_starts is not None:
        valid = valid & (key >= inputs.kv_starts[:, None])
    # [batch, width, page_size, kv_heads, dim] -> [batch, capacity, kv_heads, dim], 0 after the end
    k, v = (wide.masked_fill(~valid[:, :, None, None], 0.0) for wide in in_pages(spec, inputs, pages))
    cu_q = query_offsets(spec, inputs).clamp(0, spec.q_len)
    count = (cu_q[1:] - cu_q[:-1]).clamp(0, rows)
    query = torch.arange(rows, device=device)
    # Rows after a sequence's last query read any token in range; their results are dropped below.
    token = (cu_q[:-1, None] + query).clamp(max=max(spec.q_len - 1, 0))  # [batch, rows]
    diagonal = query + (lengths - count)[:, None]
    distance = key - diagonal[..., None]  # [batch, rows, capacity]
    seen = valid[:, None] & (query < count[:, None])[..., None]
    edge = band(spec)
    if edge.left is not None:
        seen &= distance >= -edge.left
    if edge.right is not None:
        seen &= distance <= edge.right
    seen = seen[:, None]  # [batch, 1, rows, capacity]
    if inputs.key_ranges is not None:
        place = key - (lengths - count)[:, None]  # among the sequence's new tokens; old ones: negative
        of_key = (cu_q[:-1, None] + place).clamp(0, max(spec.q_len - 1, 0))  # [batch, capacity]
        ranges = inputs.key_ranges[0][:, of_key].transpose(0, 1)  # [batch, kv_heads or 1, capacity, ranges, 2]
        shown = contains(ranges, token[:, None]) | (place < 0)[:, None, None]
        seen = seen & (shown if shown.shape[1] == 1 else shown.repeat_interleave(spec.group_size, 1))
    dense = dense_rows(spec, rows)
    bias = None
    if inputs.alibi_slopes is not None:  # [batch or 1, heads, 1, 1] * [batch, 1, rows, capacity]
        slopes = inputs.alibi_slopes.to(getattr(torch, spec.lse_dtype)).reshape(-1, spec.num_heads, 1, 1)
        bias = -slopes * distance.abs()[:, None]
    rows_of_q = inputs.q.detach()[token].to(k.dtype)
    out, lse = plain_attention.forward(dense, Inputs(rows_of_q, k, v, mask=seen, bias=bias, sinks=inputs.sinks))
    # Surplus rows of short sequences are written to an extra token at the end, which is cut off.
    out = out.to(inputs.q.dtype)
    flat_out = out.new_zeros((spec.q_len + 1, *out.shape[2:]))
    flat_lse = lse.new_full((lse.shape[1], spec.q_len + 1), -torch.inf)
    target = torch.where(query < count[:, None], token, spec.q_len).flatten()
    flat_out[target] = out.flatten(0, 1)
    flat_lse[:, target] = lse.transpose(0, 1).flatten(1)
    return flat_out[: spec.q_len], flat_lse[:, : spec.q_len]
