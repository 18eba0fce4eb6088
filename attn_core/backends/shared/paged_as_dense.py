"""Describes a paged call as a dense call with a mask, for backends that gather pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.call.spec import AttentionSpec


def dense_rows(spec: AttentionSpec, rows: int) -> AttentionSpec:
    """Returns the dense call on gathered pages: one batch row of ``rows`` queries per sequence, and a mask.

    Each row has as many keys as the block table has room for; the mask hides keys beyond a sequence's length.
    """
    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    unpaged: dict[str, Any] = {"paged": None, "documents": None, "max_len_q": None, "max_len_k": None}
    # The mask has causal and window, too: a sequence's diagonal depends on its length, unknown on the host.
    dense: dict[str, Any] = {"causal": False, "window": (None, None), "mask_shape": (batch, 1, rows, paged.capacity)}
    return replace(spec, batch=batch, q_len=rows, kv_len=paged.capacity, **unpaged, **dense)
