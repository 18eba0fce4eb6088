"""Describes a paged call as a dense call with a mask, or as packed documents, for backends that gather pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.backends.shared.pages.pools import query_offsets
from attn_core.backends.shared.pages.quantised import in_slots, working_dtype
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs


def dense_rows(spec: AttentionSpec, rows: int) -> AttentionSpec:
    """Returns the dense call on gathered pages: one batch row of ``rows`` queries per sequence, and a mask.

    Each row has as many keys as the block table has room for; the mask hides keys beyond a sequence's length. With
    quantised pages it is a call in float32.
    """
    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    unpaged: dict[str, Any] = {"paged": None, "documents": None, "max_len_q": None, "max_len_k": None}
    # The mask has causal and window, too: a sequence's diagonal depends on its length, unknown on the host.
    heads = spec.num_heads if (spec.key_ranges_shape or (1, 1))[1] > 1 else 1
    mask_shape = batch, heads, rows, paged.capacity
    dense: dict[str, Any] = {"causal": False, "window": (None, None), "mask_shape": mask_shape}
    dense["key_ranges_shape"] = None  # the mask has them, too
    dense["dtype"] = working_dtype(spec)
    if spec.alibi_shape is not None:  # of a sequence's own diagonal, too
        dense |= {"alibi_shape": None, "bias_shape": (batch, spec.num_heads, rows, paged.capacity)}
        dense["bias_dtype"] = None if spec.lse_dtype == dense["dtype"] else spec.lse_dtype
    return replace(spec, batch=batch, q_len=rows, kv_len=paged.capacity, **unpaged, **dense)


def packed_documents(spec: AttentionSpec, inputs: PagedInputs) -> tuple[AttentionSpec, Inputs]:
    """Returns a paged call as one on packed documents, for tables that are on the host and checked.

    With quantised pages it is a call in float32, whose result the caller casts to ``spec.dtype``.
    """
    import torch

    paged = spec.paged
    assert paged is not None
    table, lengths, cu_q = inputs.block_table, inputs.seq_lens.long(), query_offsets(spec, inputs)
    position = torch.arange(paged.capacity, device=lengths.device).expand(len(lengths), -1)  # [batch, capacity]
    valid = position < lengths[:, None]
    keys = lengths
    if inputs.kv_starts is not None:  # without its first keys a document has the same diagonal
        valid, keys = valid & (position >= inputs.kv_starts[:, None]), lengths - inputs.kv_starts
    cu_k = torch.nn.functional.pad(keys.cumsum(0), (1, 0)).int()
    page = table.long().repeat_interleave(paged.page_size, dim=1)[valid]
    k, v = in_slots(spec, inputs, page, (position % paged.page_size)[valid])  # [tokens, kv_heads, dim]
    ranges = inputs.key_ranges
    if ranges is not None:
        # The number of each key among the new tokens of its sequence; negative for earlier keys.
        place = position - (lengths - cu_q.diff().long())[:, None]
        token = (cu_q[:-1, None] + place).clamp(0, spec.q_len - 1)[valid]
        everyone = ranges.new_zeros(ranges.shape[3:])
        everyone[0, 1] = spec.q_len
        ranges = torch.where((place < 0)[valid][:, None, None], everyone, ranges[:, :, token])
    changes: dict[str, Any] = {"key_ranges_shape": None if ranges is None else tuple(ranges.shape)}
    changes["max_len_k"] = int(keys.max()) if len(keys) else 0
    packed = replace(spec, paged=None, kv_len=len(page), dtype=working_dtype(spec), **changes)
    others = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "alibi_slopes": inputs.alibi_slopes}
    return packed, Inputs(inputs.q.to(k.dtype), k, v, sinks=inputs.sinks, key_ranges=ranges, **others)
