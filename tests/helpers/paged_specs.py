"""Specs of calls on pages, built from shapes alone."""

from __future__ import annotations

from typing import Any

from attn_core import AttentionSpec
from attn_core.call.spec import PagedKV


def spec_of(batch: int = 64, tokens: int = 8192, new: int = 1, page_size: int = 16, **fields: Any) -> AttentionSpec:
    """A call of sequences with these numbers of tokens, 32 query heads on 8 kv heads."""
    width = -(-tokens // page_size)
    paged = PagedKV(num_pages=batch * width, page_size=page_size, width=width)
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "value_dim": 128, "dtype": "bfloat16"}
    return AttentionSpec(
        **{"batch": 1, "q_len": batch * new, "kv_len": paged.capacity, "documents": batch, "max_len_q": new},
        **{**sizes, "causal": True, "max_len_k": paged.capacity, "paged": paged, **fields},
    )
