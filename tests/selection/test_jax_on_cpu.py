"""Tests which calls JAX runs by XLA's own operations on a CPU, if no table of the machine decides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference
from attn_core.selection.preference import xla_is_faster

SMALL: dict[str, Any] = {"batch": 1, "q_len": 16, "kv_len": 16, "num_heads": 8, "num_kv_heads": 8}
SPEC = AttentionSpec(**SMALL, head_dim=64, value_dim=64, dtype="float32")
LONG = {"q_len": 512, "kv_len": 512}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"batch": 4}, False),  # 32 heads, which torch shares among the cores
        ({"kv_len": 64}, False),
        ({"q_len": 1, "kv_len": 512}, True),
        (LONG, False),
        ({**LONG, "needs_backward": True}, False),
        ({**LONG, "needs_backward": True, "dtype": "bfloat16"}, True),
        ({**LONG, "dtype": "bfloat16"}, False),
        ({**LONG, "batch": 2, "needs_backward": True, "dtype": "bfloat16"}, False),
        ({"q_len": 128, "kv_len": 128, "softcap": 30.0}, True),
        ({**LONG, "softcap": 30.0}, False),
        ({"q_len": 128, "kv_len": 128, "value_dim": 32}, True),
        ({**LONG, "documents": 4, "max_len_q": 256, "max_len_k": 256, "softcap": 30.0}, False),
    ],
    ids=str,
)
def test_the_first_backend(changes: dict[str, Any], expected: bool) -> None:
    spec = replace(SPEC, **changes)
    assert xla_is_faster(spec) is expected
    first = preference.order(spec, "jax", "cpu")[0]
    assert first == ("jax_xla" if expected else "sdpa_flash")
