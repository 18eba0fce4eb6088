"""Tests the names of parametrized cases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from case_names import pytest_make_parametrize_id as named

from attn_core import AttentionSpec

SIZES = {"batch": 1, "q_len": 5, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
SPEC = AttentionSpec(**SIZES, dtype="float32")


@dataclass(frozen=True)
class Sizes:
    rows: int
    kind: str = "plain"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"causal": True, "window": (3, None)}, "causal=True,window=(3,None)"),
        ({}, "nothing"),
        ([5, "a"], "[5,a]"),
        ({"b", "a"}, "(a,b)"),
        (np.dtype("float32"), "float32"),
        (np.zeros((2, 3), np.int32), "int32 [2, 3]"),
        (Sizes(5), "rows=5"),
        (SPEC, "float32, batch 1, q_len 5, kv_len 7, heads 4/2, head_dim 8"),
        ("text", None),
        (3.5, None),
        (None, None),
    ],
)
def test_a_case_is_named_by_its_value(value: Any, name: str | None) -> None:
    assert named(value) == name
