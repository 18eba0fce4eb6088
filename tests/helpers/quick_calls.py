"""A few tiny calls of a sweep, which a CPU runs in seconds. Their times mean nothing."""

from __future__ import annotations

from typing import Any

from attn_core.call.spec import AttentionSpec
from benchmarks.fit.calls import SweepCase


def _quick(name: str, q_len: int = 64, lengths: tuple[int, ...] | None = None, **options: Any) -> SweepCase:
    settings: dict[str, Any] = {"batch": 2, "kv_len": 64, "num_heads": 4, "num_kv_heads": 2} | options
    if lengths is not None:
        settings |= {"batch": 1, "documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    spec = AttentionSpec(q_len=q_len, head_dim=16, value_dim=16, dtype="float32", **settings)
    return SweepCase(f"quick {name}", spec, lengths, training=q_len > 1)


QUICK: tuple[SweepCase, ...] = (
    _quick("full", num_kv_heads=4),
    _quick("causal", causal=True),
    _quick("window 16", causal=True, window=(15, 0)),
    _quick("softcap", softcap=50.0),
    _quick("packed", causal=True, lengths=(17, 5, 42)),
    _quick("mask", mask_shape=(2, 1, 1, 64)),
    _quick("decode", 1, causal=True),
)
