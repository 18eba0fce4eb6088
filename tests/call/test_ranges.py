"""Tests the names of ranges."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from attn_core import AttentionSpec, PagedKV
from attn_core.call.observe import DTYPE_WORDS, FEATURE_WORDS, range_name
from attn_core.call.spec import DTYPES

SPEC = AttentionSpec(
    batch=2, q_len=2048, kv_len=4096, num_heads=8, num_kv_heads=2, head_dim=64, value_dim=64, dtype="bfloat16"
)
SIZES = "b2 q2048 kv4096 h8:2 d64 bf16"
IN_EVERY_NAME = ("batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "value_dim", "dtype")
IN_NO_NAME = ("scale", "bias_dtype", "max_len_q", "max_len_k", "needs_backward", "bias_gradient", "return_lse")
IN_NO_NAME += ("aux", "aux_gradients")
"""Fields that do not change which kernel runs, or how long."""

WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"causal": True}, " causal"),
    ({"causal": True, "alignment": "top_left"}, " causal top_left"),
    ({"alignment": "top_left"}, ""),
    ({"causal": True, "window": (255, 0)}, " causal w256"),
    ({"causal": True, "window": (255, None)}, " causal w256"),
    ({"window": (64, 32)}, " w64:32"),
    ({"window": (64, None)}, " w64:"),
    ({"window": (None, 32)}, " w:32"),
    ({"softcap": 50.0}, " softcap50"),
    ({"mask_shape": (2, 1, 1, 4096), "bias_shape": (1, 8, 2048, 4096)}, " mask bias"),
    ({"alibi_shape": (8,), "sinks": True}, " alibi sinks"),
    ({"dropout": 0.1, "deterministic": True}, " dropout0.1 deterministic"),
    ({"partial": True}, " partial"),
    ({"scale": 2.0, "needs_backward": True, "return_lse": True}, ""),
]


@pytest.mark.parametrize(("options", "words"), WORDS, ids=[words.strip() or "plain" for _, words in WORDS])
def test_a_name_has_a_word_for_each_feature(options: dict[str, Any], words: str) -> None:
    assert range_name("flash3", replace(SPEC, **options), "backward") == f"attn.flash3 backward {SIZES}{words}"


def test_names_of_documents_and_pages() -> None:
    packed = replace(SPEC, batch=1, kv_len=2048, value_dim=32, documents=3, max_len_q=1000, max_len_k=1000)
    assert range_name("math", packed, "forward") == "attn.math forward b1 q2048 kv2048 h8:2 d64:32 bf16 docs3"
    pool = PagedKV(num_pages=9, page_size=16, width=4)
    paged = replace(packed, kv_len=pool.capacity, max_len_k=pool.capacity, paged=pool)
    assert range_name("math", paged, "forward").endswith("kv64 h8:2 d64:32 bf16 docs3 pages16")


def test_every_field_is_in_the_name_or_listed_here() -> None:
    assert {field.name for field in fields(AttentionSpec)} == {*IN_EVERY_NAME, *FEATURE_WORDS, *IN_NO_NAME}
    assert set(DTYPE_WORDS) == set(DTYPES)
