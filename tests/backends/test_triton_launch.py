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
        self.code = type(
            "Compiled", (), {"__getitem__": lambda _, grid: lambda *rest: self.direct.append((grid, *rest))}
        )()
        self.params = [SimpleNamespace(name=name, is_constexpr=constant) for name, constant in names.items()]

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **constants: Any) -> Any:
            self.searched.append((grid, *arguments, constants))
            return self.code

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(triton_launch, "_launches_directly", lambda: True)
    monkeypatch.setattr(triton_launch, "_launches", {})
    return Kernel()


def aligned() -> Any:
    return torch.zeros(64)


def launched(kernel: Kernel, key: Any, tensors: tuple[Any, ...], describe: Any) -> None:
    triton_launch.launch(kernel, key, tensors, describe)


GRID = (3, 1, 1)


def describe() -> triton_launch.Description:
    return GRID, (7,), {"ROWS": 4, "WIDE": 8, "num_warps": 2}


def test_the_second_launch_of_a_key_searches_nothing(kernel: Kernel) -> None:
    x, y = aligned(), aligned()
    launched(kernel, "key", (x,), describe)
    launched(kernel, "key", (y,), lambda: pytest.fail("described again"))
    assert kernel.searched == [(GRID, x, 7, {"ROWS": 4, "WIDE": 8, "num_warps": 2})]
    # Addresses instead of tensors, and the constants in the order of the parameters.
    assert kernel.direct == [(GRID, y.data_ptr(), 7, 8, 4)]
    launched(kernel, "another key", (x,), describe)
    assert len(kernel.searched) == 2


def test_an_address_of_another_alignment_searches(kernel: Kernel) -> None:
    shifted = torch.zeros(65)[1:]
    for tensor in (shifted, aligned(), shifted, aligned()):
        launched(kernel, "key", (tensor,), describe)
    assert [call[1].data_ptr() % 16 for call in kernel.searched] == [4, 0, 4]
    assert len(kernel.direct) == 1


class CudaLauncher:
    """As Triton's launcher of this name: Python around ``launch``, which is generated in C."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self) -> None:
        self.launched: list[Any] = []

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)


@pytest.fixture
def launcher(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> CudaLauncher:
    """A launcher of the kernel's compiled code, on device 7 with 77 as the current stream."""
    driver = pytest.importorskip("triton.runtime.driver").driver
    active = SimpleNamespace(get_current_stream=lambda device: 70 + device, get_current_device=lambda: 7)
    monkeypatch.setattr(driver, "_active", active)
    kernel.code.run, kernel.code.function, kernel.code.packed_metadata = CudaLauncher(), 5, (4, 1, 0)
    return kernel.code.run  # type: ignore[no-any-return]


def test_a_direct_launch_calls_the_launcher_in_c(kernel: Kernel, launcher: CudaLauncher) -> None:
    x, y, z = aligned(), aligned(), aligned()
    launched(kernel, "key", (x,), describe)
    launched(kernel, "key", (y,), describe)
    again = triton_launch.launch(kernel, "key", (x,), describe)
    assert again is not None
    again(z.data_ptr())
    # As triton 3.6 orders them: grid, stream, function, two flags, scratch memory twice, metadata, hooks, arguments.
    before = (*GRID, 77, 5, False, True, None, None, (4, 1, 0), None, None, None)
    assert launcher.launched == [(*before, each.data_ptr(), 7, 8, 4) for each in (y, x, z)]
    assert len(kernel.searched) == 1 and not kernel.direct


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_direct_launches(
    kernel: Kernel, launcher: CudaLauncher, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, x = pytest.importorskip("triton").knobs.runtime, aligned()
    for hook in (SimpleNamespace(calls=[print]), print):  # triton's own chain of hooks, and a single one
        launched(kernel, "key", (x,), describe)
        with monkeypatch.context() as within:
            within.setattr(runtime, name, hook)
            launched(kernel, "key", (x,), describe)
    assert kernel.direct == 2 * [(GRID, x.data_ptr(), 7, 8, 4)] and len(launcher.launched) == 1


def test_code_with_scratch_memory_is_launched_by_triton(kernel: Kernel, launcher: CudaLauncher) -> None:
    launcher.global_scratch_size = 8
    for _ in range(2):
        launched(kernel, "key", (aligned(),), describe)
    assert len(kernel.direct) == 1 and not launcher.launched


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
