"""Keys and values in pages, for torch's CPU flash kernel: decoding in one call, everything else as packed documents.

If each sequence has one query, its pages are gathered into one row of a batch, and a mask hides the rest of the row.
The heads of a group become queries of the kernel, which then reads each key once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.backends.sdpa_flash import additive_masks, containment
from attn_core.backends.sdpa_flash.cpu_kernel import kernels, run_twice
from attn_core.backends.shared import rewrites
from attn_core.backends.shared.paged_as_dense import packed_documents
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, PagedInputs

MOST_PADDING = 2
"""Rows are padded to the longest sequence if that makes at most this many times the tokens."""
FEW_TOKENS = 1024
"""So few padded tokens always are one call, because a call of each sequence costs more."""

WORTH_TWO_ROWS = 2048
"""Elements of a head's keys from which one query is computed twice in bfloat16; see ``cpu_kernel``."""


def forward(
    spec: AttentionSpec, inputs: PagedInputs, packed_forward: Callable[[AttentionSpec, Inputs], tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Returns (out, lse) of a paged call whose tables are checked.

    Args:
        packed_forward: runs a call on packed documents.
    """
    lengths = inputs.seq_lens.tolist()
    padded = len(lengths) * max(lengths)
    decoding = inputs.cu_seqlens_q is None and 0 < padded <= max(FEW_TOKENS, MOST_PADDING * sum(lengths))
    if not decoding:
        return packed_forward(*packed_documents(spec, inputs))
    out, lse = _decode(spec, inputs, lengths)
    return rewrites.with_sinks(out, lse, inputs.sinks) if spec.sinks else (out, lse)


def _decode(spec: AttentionSpec, inputs: PagedInputs, lengths: list[int]) -> tuple[Any, Any]:
    """Returns (out, lse) without sinks of one query for each sequence."""
    import torch

    paged, batch, longest = spec.paged, len(lengths), max(lengths)
    assert paged is not None
    columns, shortest = -(-longest // paged.page_size), min(lengths)
    table = inputs.block_table[:, :columns]
    if shortest <= (columns - 1) * paged.page_size:  # entries behind a last page may hold any value
        table = table.clamp(0, paged.num_pages - 1)
    pages = table.reshape(-1)
    # [pages, page_size, kv_heads, dim] -> [batch, columns * page_size, kv_heads, dim]
    k, v = (
        pool.detach().index_select(0, pages).view(batch, columns * paged.page_size, *pool.shape[2:])
        for pool in (inputs.k, inputs.v)
    )
    if shortest == longest:
        k, v = k[:, :longest], v[:, :longest]
    seen = _visible(spec, inputs.seq_lens, lengths, k.shape[1])
    added: Any = None
    if seen is not None:
        added = additive_masks.additive(spec.lse_dtype, k.device, seen, None, None, slice(0), slice(0))
    # [batch, heads, dim] -> [batch, kv_heads, group, dim]
    q = inputs.q.detach().contiguous().view(batch, spec.num_kv_heads, spec.group_size, spec.head_dim)
    twice = q.shape[2] == 1 and spec.dtype == "bfloat16" and longest * spec.head_dim >= WORTH_TWO_ROWS
    op = run_twice if twice else kernels()[0]
    options: dict[str, Any] = {"attn_mask": added, "scale": spec.scale}
    out, lse = op(q, k.transpose(1, 2), v.transpose(1, 2), 0.0, False, **options)
    if seen is not None and not containment.are_results_finite(out, lse):
        hidden = ~seen.view(batch, -1, 1, 1)  # each row has one query, so what it does not see may become 0
        k, v = k.masked_fill_(hidden, 0.0), v.masked_fill_(hidden, 0.0)
        out, lse = op(q, k.transpose(1, 2), v.transpose(1, 2), 0.0, False, **options)
    out, lse = out.flatten(1, 2), lse.flatten(1).t()
    if shortest == 0:
        lse = lse.masked_fill(inputs.seq_lens == 0, -torch.inf)
    return out, lse


def _visible(spec: AttentionSpec, seq_lens: Any, lengths: list[int], keys: int) -> Any:
    """Returns which keys each sequence's query sees, bool ``[batch, 1, 1, keys]``, or None if all see all."""
    import torch

    left = band(spec).left
    if all(length == keys for length in lengths) and (left is None or left >= keys - 1):
        return None
    ends, key = seq_lens[:, None], torch.arange(keys, device=seq_lens.device)
    seen = key < ends
    if left is not None:
        seen &= key >= ends - (left + 1)  # the query is the sequence's last token, at ends - 1
    return seen[:, None, None]
