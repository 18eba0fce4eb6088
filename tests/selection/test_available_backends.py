"""Tests available_backends: every name has a version or a reason, and a broken import makes only that backend
unavailable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from frameworks import BOTH, JAX, TORCH, Framework, empty_plan_caches
from torch_first import torch_first  # noqa: F401 (a fixture)

from attn_core import Target, backends
from attn_core.selection import choice, target

BREAKS: dict[str, Exception] = {
    "missing package": ModuleNotFoundError("No module named 'flash_attn'"),
    "missing library": OSError("libcudart.so.13: cannot open shared object file"),
    "missing symbol": ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi"),
    "moved name": AttributeError("module 'torch.ops.aten' has no attribute '_flash'"),
    "broken file": SyntaxError("invalid syntax"),
    "wrong version": RuntimeError("built for torch 2.9, found 2.13"),
    "lines": ValueError("several\nlines"),
}


def empty_caches() -> None:
    """Empties what is remembered of this installation."""
    backends.availability.cache_clear()
    target.local_target.cache_clear()
    target.bridge_reason.cache_clear()
    choice._explained.cache_clear()
    empty_plan_caches()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """``replace_fields`` is undone before the caches are emptied."""
    empty_caches()
    yield
    empty_caches()


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    """Undone before the caches are emptied."""
    with pytest.MonkeyPatch.context() as made:
        yield made


def breaking(error: BaseException) -> Any:
    def probe() -> str:
        raise error

    return probe


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_every_name_has_a_version_or_a_reason(framework: Framework) -> None:
    actual = framework.frontend.available_backends()
    assert tuple(actual) == backends.names()
    for name, entry in actual.items():
        assert (entry.version is None) is not (entry.reason is None), name
        assert str(entry) == (f"available ({entry.version})" if entry.version else entry.reason)
    usable = {name for name, entry in actual.items() if entry.reason is None}
    assert {"sdpa_flash", "math", "flex"} <= usable
    assert ("jax_xla" in usable) is (framework is JAX)


def test_the_reasons_of_unavailable_backends() -> None:
    actual = TORCH.frontend.available_backends()
    assert actual["jax_xla"].reason == "runs in JAX only"
    on_gpu = target.availability("torch", "sm90")
    assert "CPU" not in (on_gpu["sdpa_flash"].reason or "")  # this name has a file for GPUs
    assert on_gpu["math"].reason is None
    assert target.availability("torch", "cpu")["flash3"].reason


@pytest.mark.parametrize("error", BREAKS.values(), ids=BREAKS)
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_broken_import_makes_only_that_backend_unavailable(
    framework: Framework, error: Exception, replace_fields: Any
) -> None:
    whole = framework.frontend.available_backends()
    record = backends.load("sdpa_flash")
    replace_fields(record, probe=breaking(error))
    empty_caches()
    broken = framework.frontend.available_backends()
    reason = f"not available: {type(error).__name__}: {error} (needs {record.requires})"
    assert broken["sdpa_flash"] == (None, reason)
    assert {name: entry for name, entry in broken.items() if name != "sdpa_flash"} == {
        name: entry for name, entry in whole.items() if name != "sdpa_flash"
    }


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_calls_run_on_the_remaining_backends_with_the_reason(framework: Framework, replace_fields: Any) -> None:
    replace_fields(backends.load("sdpa_flash"), probe=breaking(BREAKS["missing library"]))
    empty_caches()
    call = {name: framework.zeros(1, 3, 2, 5) for name in "qkv"}
    actual = framework.frontend.explain(**call)
    assert actual.backend == "math"
    assert actual.reasons("sdpa_flash") == (f"not available: OSError: {BREAKS['missing library']} (needs torch>=2.11)",)
    assert framework.frontend.attention(**call).shape == (1, 3, 2, 5)
    with pytest.raises(
        NotImplementedError, match=r"^backend='sdpa_flash' cannot run this call:\n  not available: OSError: libcudart"
    ):
        framework.frontend.attention(**call, backend="sdpa_flash")


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_with_everything_broken_the_error_lists_everything(framework: Framework, replace_fields: Any) -> None:
    for name in backends.names():
        replace_fields(backends.load(name), probe=breaking(OSError(f"{name} is broken")))
    empty_caches()
    assert all(entry.reason for entry in framework.frontend.available_backends().values())
    with pytest.raises(NotImplementedError, match=r"^no backend can run this call") as caught:
        framework.frontend.attention(**{name: framework.zeros(1, 3, 2, 5) for name in "qkv"})
    for name in backends.usual_order(framework.name, "cpu"):
        assert f"not available: OSError: {name} is broken" in str(caught.value)


def test_without_the_bridge_jax_runs_its_own_operations(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(__import__("sys").modules, "jax_tvm_ffi", None)
    empty_caches()
    actual = JAX.frontend.available_backends()
    reason = actual["math"].reason or ""
    assert reason.startswith("the bridge from JAX is not available: ModuleNotFoundError: ")
    assert "needs jax-tvm-ffi" in reason
    assert actual["jax_xla"].reason is None
    selected = JAX.frontend.explain(**{name: JAX.zeros(1, 3, 2, 5) for name in "qkv"})
    assert selected.backend == "jax_xla"
    assert selected.reasons("sdpa_flash") == (reason,)
    assert TORCH.frontend.available_backends()["math"].reason is None


def test_choosing_imports_no_backends_of_other_devices(replace_fields: Any) -> None:
    """A call on one device must neither wait for nor fail with the kernels of another device."""
    for name in ("sdpa_flash", "flash2"):
        replace_fields(backends.load(name), probe=breaking(AssertionError("imported")))
    empty_caches()
    assert "imported" not in dict(Target.here("torch", "sm90").unavailable).get("sdpa_flash", "")
    assert "flash2" not in dict(Target.here("torch", "cpu").unavailable)
    assert "imported" in dict(Target.here("torch", "sm90").unavailable)["flash2"]
    assert "imported" in dict(Target.here("torch", "cpu").unavailable)["sdpa_flash"]


def test_each_backend_is_probed_once(replace_fields: Any) -> None:
    calls = []
    replace_fields(backends.load("math"), probe=lambda: calls.append(1) or "1.0")
    empty_caches()
    for _ in range(3):
        assert TORCH.frontend.available_backends()["math"].version == "1.0"
        Target.here("torch", "cpu")
    assert len(calls) == 1
