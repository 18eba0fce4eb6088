"""The calls that a package is judged by: would automatic choice run one of them on it?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from attn_core.backends.shared.device_kinds import half_dtype
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec

_PROMPT = AttentionSpec(
    batch=4,
    q_len=4096,
    kv_len=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    dtype="bfloat16",
    causal=True,
)
_TRAINING = replace(_PROMPT, needs_backward=True)
_PACKED: dict[str, Any] = {"batch": 1, "documents": 8, "max_len_q": 1024, "max_len_k": 1024}
_PAGED: dict[str, Any] = {
    "documents": 64,
    "max_len_q": 1,
    "max_len_k": 8192,
    "paged": PagedKV(num_pages=8192, page_size=64, width=128),
}

CALLS = {
    "prompts": _PROMPT,
    "training": _TRAINING,
    "packed documents": replace(_TRAINING, **_PACKED),
    "windows": replace(_TRAINING, window=(1023, 0)),
    "softcaps": replace(_TRAINING, softcap=50.0),
    "ALiBi": replace(_TRAINING, alibi_shape=(32,)),
    "decoding": replace(_PROMPT, batch=64, q_len=1),
    "pages": replace(_PROMPT, batch=1, q_len=64, kv_len=8192, **_PAGED),
}
"""Calls of a language model's layer (32 heads of 128 channels, in groups of four) by what they do.

All but prompts, decoding and pages have gradients."""


def calls_on(device: str) -> dict[str, AttentionSpec]:
    """Returns ``CALLS`` in the half precision of a device."""
    return {name: replace(spec, dtype=half_dtype(device)) for name, spec in CALLS.items()}
