"""Tests direct launches of Triton kernels, with a stand-in for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from attn_core.backends.shared import triton as triton_launch

torch = pytest.importorskip("torch")


class Kernel:
    """As ``triton.jit``: ``kernel[grid](...)`` launches and returns compiled code, which launches without the search.

    Attributes:
        searched, direct: the arguments of both kinds of launches, with the grid first.
    """

    def __init__(self) -> None:
        self.searched: list[Any] = []
        self.direct: list[Any] = []
        names = {"x": False, "number": False, "WIDE": True, "ROWS": True}
        self.params = [SimpleNamespace(name=name, is_constexpr=constant) for name, constant in names.items()]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.searched.append((grid, *arguments, constants))
            return compiled

        def run(*arguments: Any) -> None:
            self.direct.append((grid, *arguments))

        compiled = type("Compiled", (), {"__getitem__": lambda self, same: run})()
        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "_launches_directly", lambda: True)
    monkeypatch.setattr(triton_launch, "_launches", {})
    return Kernel()


def aligned() -> Any:
    return torch.zeros(64)


def launched(kernel: Kernel, key: Any, tensors: tuple[Any, ...], describe: Any) -> None:
    triton_launch.launch(kernel, key, tensors, describe, unaligned=tensors)


GRID = (3, 1, 1)


def describe() -> triton_launch.Description:
    return GRID, (7,), {"ROWS": 4, "WIDE": 8, "num_warps": 2}


def test_the_second_launch_of_a_key_searches_nothing(kernel: Kernel) -> None:
    x, y = aligned(), aligned()
    launched(kernel, "key", (x,), describe)
    launched(kernel, "key", (y,), lambda: pytest.fail("described again"))
    assert kernel.searched == [(GRID, x, 7, {"ROWS": 4, "WIDE": 8, "num_warps": 2})]
    ((grid, tensor, *rest),) = kernel.direct
    assert grid == GRID and tensor is y and rest == [7, 8, 4]  # the constants in the order of the parameters
    launched(kernel, "another key", (x,), describe)
    assert len(kernel.searched) == 2


def test_an_address_of_another_alignment_searches(kernel: Kernel) -> None:
    shifted = torch.zeros(65)[1:]
    for tensor in (shifted, aligned(), shifted, aligned()):
        launched(kernel, "key", (tensor,), describe)
    assert [call[1].data_ptr() % 16 for call in kernel.searched] == [4, 0, 4]
    assert len(kernel.direct) == 1


def test_another_version_of_triton_searches_always(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_launches_directly", lambda: False)
    for _ in range(3):
        launched(kernel, "key", (aligned(),), describe)
    assert len(kernel.searched) == 3 and not kernel.direct


def test_the_number_of_launches_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "MOST_LAUNCHES", 3)
    for key in range(10):
        launched(kernel, key, (aligned(),), describe)
    assert len(triton_launch._launches) <= 3
