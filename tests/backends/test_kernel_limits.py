"""Tests limits that CUDA kernels share: refused by name and number, also in automatic choice, on machines without a
GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import xformers

SPEC = AttentionSpec(
    **{"batch": 16, "q_len": 32768, "kv_len": 32768, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "needs_backward": True},
)
GPU = Target("torch", "sm90")


def reasons(spec: AttentionSpec, name: str) -> str:
    """The reasons against a backend, or against an operator of xformers: "xformers:flash"."""
    backend, _, operator = name.partition(":")
    return "; ".join(xformers._misfits(operator, spec) if operator else explain(spec, GPU, backend).reasons(backend))


@pytest.mark.parametrize("backend", ["sdpa_flash", "flash2", "xformers:flash"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch": 8300, "q_len": 1, "kv_len": 1, "num_heads": 16, "num_kv_heads": 16},
        {"batch": 1, "q_len": 600_000, "kv_len": 600_000, "documents": 2, "max_len_q": 300_000, "max_len_k": 300_000},
    ],
)
def test_the_32_bit_sums_of_dq_limit_the_size_of_a_call(backend: str, sizes: dict[str, Any]) -> None:
    spec = replace(SPEC, **sizes)
    assert "counts the sums of dq in 32 bits" in reasons(spec, backend)
    assert "sums of dq" not in reasons(replace(spec, needs_backward=False), backend)
    small = replace(spec, batch=1, q_len=64, kv_len=64, documents=None, max_len_q=None, max_len_k=None)
    assert "sums of dq" not in reasons(small, backend)


@pytest.mark.parametrize("backend", ["sdpa_efficient", "xformers:cutlass", "xformers", "flex"])
def test_masks_of_2_to_the_31_elements_are_refused(backend: str) -> None:
    sizes = {"batch": 1, "q_len": 50_000, "kv_len": 50_000, "mask_shape": (1, 1, 50_000, 50_000), "causal": False}
    assert "mask" in reasons(replace(SPEC, **sizes), backend)


@pytest.mark.parametrize("sizes", [{"batch": 70_000}, {"num_heads": 70_000, "num_kv_heads": 70_000}])
@pytest.mark.parametrize("backend", ["flash2", "flash4", "xformers:flash", "xformers:cutlass", "sage", "sdpa_flash"])
def test_calls_beyond_the_launch_grid_are_refused(backend: str, sizes: dict[str, Any]) -> None:
    spec = replace(SPEC, **{"batch": 1, "q_len": 64, "kv_len": 64, **sizes}, needs_backward=False)
    assert "stops at 65535" in reasons(spec, backend)


def test_the_padded_log_sum_exp_of_unequal_documents_is_bounded() -> None:
    spec = replace(SPEC, batch=1, q_len=65536, kv_len=65536, documents=1000, max_len_q=32768, max_len_k=32768)
    assert "pads the log-sum-exp" in reasons(spec, "sdpa_efficient")
    assert "pads" not in reasons(replace(spec, max_len_q=128, max_len_k=128), "sdpa_efficient")
