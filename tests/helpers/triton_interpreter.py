"""Triton's interpreter, which runs kernels on the CPU, in a second process: a plugin of pytest, and its patches.

Triton decides when a kernel is defined whether the kernel is compiled or interpreted. Therefore a second process runs
each test with the fixture ``interpreter``, unless this process already has TRITON_INTERPRET=1. Its imports take
seconds, so one process runs the tests of all files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from other_process import OtherProcess

from attn_core.backends.shared.in_order import order
from attn_core.backends.shared.in_order.order import Order, Tiles

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session")
def interpreter(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OtherProcess | None]:
    """The process that runs the tests; None if this process does."""
    if INTERPRETED:
        yield None
        return
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTEST_ADDOPTS"] = f"--hypothesis-profile={settings.get_current_profile_name()}"
    log = tmp_path_factory.mktemp("interpreter") / "log"
    files = {test.path for test in request.session.items if "interpreter" in getattr(test, "fixturenames", ())}
    second = OtherProcess(sorted(files), request.config.rootpath, log, environment)
    yield second
    second.end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Sends a test with the fixture ``interpreter`` to the process that the fixture starts."""
    second = pyfuncitem.funcargs.get("interpreter")
    if second is None:
        return None
    second.run(pyfuncitem.nodeid)
    return True


def patch_numbers() -> None:
    """Gives the interpreter's numbers an ``__index__`` that numpy 2.4 allows: an array of one element is none there."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def patch_products() -> None:
    """Makes the interpreter multiply bfloat16 numbers; it would multiply their bits, which it keeps as integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, *(_widened(each) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b)), *rest)

    def _widened(handle: Any) -> Any:
        wide = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(wide.view("float32"), tl.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


def patch_rounding() -> None:
    """Makes the interpreter round float32 to the nearest bfloat16, as GPUs do; it would cut the last bits off."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_fp_trunc

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return original(self, source, kind)
        bits = source.data.view("uint32")
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # halves to even
        bits = np.where(np.isnan(source.data), (bits >> 16) | 0x40, nearest).astype("uint16")
        return interpreter.TensorHandle(bits, tl.bfloat16)

    interpreter.InterpreterBuilder.create_fp_trunc = create_fp_trunc


def slow_draws(number: int) -> int:
    """A number of draws that take seconds each: a third in the sample, but two, as the first draw is the simplest."""
    return max(2, number // 3) if settings.get_current_profile_name() == "sample" else number


# Small tiles and shares for the kernels that add in one order

SMALL = Order(16, 32, (Tiles(16, 16, 1, 2), Tiles(32, 16, 2, 2)))
"""So that few keys are several tiles and shares."""
ALL, NONE = 10**9, 0
"""FEW_PROGRAMS with which each share has a program of its own, or no share."""


def product(self: Any, a: Any, b: Any, sums: Any, *rest: Any) -> Any:
    """A product whose rows are independent of each other, as a GPU's are; those of numpy's library need not be."""
    from triton.runtime.interpreter import TensorHandle

    rows, columns = (_float32(each) for each in (a, b))
    total = np.zeros_like(sums.data)  # so that a sum depends on the tiles, as a GPU's does
    for at in range(rows.shape[1]):
        total += rows[:, at : at + 1] * columns[at]
    return TensorHandle(sums.data + total, sums.dtype.scalar)


def _float32(handle: Any) -> np.ndarray:
    import triton.language as tl

    if handle.dtype.scalar == tl.bfloat16:  # the interpreter keeps its bits as integers
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def make_small(patch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Small tiles and shares, and products as a GPU has them."""
    from triton.runtime.interpreter import InterpreterBuilder

    patch.setattr(InterpreterBuilder, "create_dot", product)
    patch.setattr(order, "NARROW", SMALL)
    return patch


def patch_calls() -> None:
    """Patches ``triton.language`` once in a launch for the functions of a module that a kernel calls.

    The interpreter would do it for every call, which takes a quarter of the time.
    """
    from triton.runtime import interpreter

    launch, modules = interpreter.GridExecutor.__call__, set[int]()

    def launched(self: Any, *arguments: Any, **named: Any) -> None:
        modules.clear()  # what the launch before has patched is restored
        launch(self, *arguments, **named)

    def called(self: Any, *arguments: Any, **named: Any) -> Any:
        module = id(self.fn.__globals__)
        if module not in modules:
            modules.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **named)

    interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.__call__ = launched, called


if INTERPRETED:
    patch_calls()
    patch_numbers()
    patch_products()
    patch_rounding()
