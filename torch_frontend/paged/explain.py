"""explain_paged: which backend runs a call on pages, for torch tensors."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import ExplainPagedKeywords
from attn_core.call.options import PAGED, requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.selection import Selection, explain, override
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.plan import gather_arguments, metadata, options_of, request

Tensor = torch.Tensor
_shared = SharedOptions(paged_attention, ExplainPagedKeywords.__optional_keys__)


@_shared
def explain_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    block_table: Any,
    seq_lens: Any,
    **options: Unpack[ExplainPagedKeywords[Tensor]],
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    said = _shared.complete(explain_paged, {**options}) | {"block_table": block_table, "seq_lens": seq_lens}
    call = options_of(*[said[name] for name in PAGED])
    given = PagedInputs(q, k_pages, v_pages, **{name: said[name] for name in PagedInputs._fields if name not in "qkv"})
    inputs = gather_arguments(given, call.max_len_q)
    return explain(*request(metadata(inputs), call, requested_names(said["backend"]) or override.requested()))
