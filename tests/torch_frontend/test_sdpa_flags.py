"""Tests that torch's switches of its own attention are named if a call uses a kernel that they switch off."""

from __future__ import annotations

import warnings

import pytest
import torch
from frameworks import empty_plan_caches
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_frontend import attention, use_backend


@pytest.fixture(autouse=True)
def new_plans() -> None:
    empty_plan_caches(programs=False)


def test_a_kernel_that_is_switched_off_is_named() -> None:
    q = torch.randn(1, 5, 2, 8)
    says = (
        r"switch for flash kernels is off \(torch.nn.attention.sdpa_kernel .* sdpa_flash; write use_backend\('math'\)"
    )
    with sdpa_kernel(SDPBackend.MATH), pytest.warns(UserWarning, match=says):
        attention(q, q, q)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.warns(UserWarning, match="math kernels is off .* uses math;"):
        attention(q, q, q, softcap=3.0)


def test_allowed_kernels_are_not_named() -> None:
    q = torch.randn(1, 5, 2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, q, q)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            attention(q[:, :3], q, q)
        with sdpa_kernel(SDPBackend.MATH), use_backend("math"):
            attention(q, q, q)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            attention(q, q, q, backend="flex")  # no switch is for it
