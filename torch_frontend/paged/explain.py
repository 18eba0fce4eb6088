"""explain_paged: which backend runs a call on pages, for torch tensors."""

from __future__ import annotations

from typing import Any, Never

import torch

from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.options import requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.selection import Selection, explain, override
from torch_frontend.paged.plan import gather_arguments, metadata, options_of, request

Tensor = torch.Tensor


@hide_unknown
def explain_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    key_ranges: Any = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    alibi_slopes: Tensor | None = None,
    kv_starts: Any = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    if unknown:
        refuse_keywords(explain_paged, unknown)
    options = options_of(causal, window, softcap, scale, deterministic, return_lse, max_len_q, invariant)
    tables, scales = (block_table, seq_lens, cu_seqlens_q), (k_scales, v_scales)
    given = PagedInputs(q, k_pages, v_pages, *tables, sinks, key_ranges, alibi_slopes, kv_starts, *scales)
    inputs = gather_arguments(given, max_len_q)
    return explain(*request(metadata(inputs), options, requested_names(backend) or override.requested()))
