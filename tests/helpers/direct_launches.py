"""Direct launches in Triton's interpreter, as with compiled code: kernels get nothing but addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from attn_core.backends.shared import triton as triton_launch


def memory_at(address: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * 16).from_address(address), dtype=dtype)


def launch_by_address(patch: pytest.MonkeyPatch) -> list[Any]:
    """Makes launches direct. Returns the list of them."""
    direct: list[Any] = []

    def compiled(kernel: Any, grid: Any, arguments: Any, fixed: Any, constants: Any) -> Any:
        def run(*addresses: int) -> None:
            direct.append(kernel)
            kinds = [argument.dtype for argument in arguments]
            kernel[grid](*map(memory_at, addresses, kinds), *fixed, **constants)

        kernel[grid](*arguments, *fixed, **constants)
        return run

    patch.setattr(triton_launch, "_launch_compiled", compiled)
    patch.setattr(triton_launch, "_launches", {})
    return direct
