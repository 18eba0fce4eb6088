"""Checks the shapes of a spec's tables: mask, bias, key ranges and slopes."""

from __future__ import annotations

from typing import Any

from attn_core.call.key_ranges import check_shape
from attn_core.errors import ShapeError


def check_tables(spec: Any) -> None:
    """Raises ShapeError, naming the table, unless the shapes of an ``AttentionSpec``'s tables fit its sizes."""
    full = (spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
    for name in ("mask", "bias"):
        shape = getattr(spec, f"{name}_shape")
        if shape is not None and (len(shape) != 4 or any(n not in (1, m) for n, m in zip(shape, full, strict=True))):
            raise ShapeError(
                f"{name}: expected a shape broadcastable to [batch, heads, q, kv] = {list(full)}, got {list(shape)}"
            )
    check_shape(spec.key_ranges_shape, spec.batch, spec.num_kv_heads, spec.kv_len if spec.paged is None else spec.q_len)
    # With pages the sequences are the spec's documents.
    rows, axis = (spec.batch, "batch") if spec.paged is None else (spec.documents, "sequences")
    if spec.alibi_shape is not None and spec.alibi_shape not in ((spec.num_heads,), (rows, spec.num_heads)):
        raise ShapeError(
            f"alibi_slopes: expected shape [heads] = [{spec.num_heads}] or [{axis}, heads] = "
            f"[{rows}, {spec.num_heads}], got {list(spec.alibi_shape)}"
        )
