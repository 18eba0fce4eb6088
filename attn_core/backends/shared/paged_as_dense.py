"""A paged call as a dense one with a mask, for backends that gather."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.call.spec import AttentionSpec


def dense_rows(spec: AttentionSpec, rows: int) -> AttentionSpec:
    """The call on a batch of rows of as many keys as the table is wide, ``rows`` queries each; a mask says who sees."""
    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    apart: dict[str, Any] = {"paged": None, "documents": None, "max_len_q": None, "max_len_k": None}
    whole: dict[str, Any] = {"causal": False, "window": (None, None), "mask_shape": (batch, 1, rows, paged.capacity)}
    return replace(spec, batch=batch, q_len=rows, kv_len=paged.capacity, **apart, **whole)
