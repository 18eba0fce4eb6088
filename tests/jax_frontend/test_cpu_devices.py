"""The tests' process has four CPU devices in JAX, and a caller's XLA_FLAGS replace the tests' own."""

from __future__ import annotations

import os

import pytest

jax = pytest.importorskip("jax")
import cpu_meshes
import xla_compiler


def test_the_process_has_four_cpu_devices() -> None:
    """Without this test the tests over several devices could all be skipped, and nobody would see it."""
    if xla_compiler.FOUR_DEVICES not in os.environ["XLA_FLAGS"].split():
        pytest.skip("the caller's XLA_FLAGS ask for another number of CPU devices")
    if "cpu" not in (os.environ.get("JAX_PLATFORMS") or "cpu").split(","):
        pytest.skip("the caller's JAX_PLATFORMS leave the CPU out")
    assert len(jax.devices("cpu")) == 4
    assert cpu_meshes.missing(4) is None
    assert cpu_meshes.mesh((2, 2), ("one", "other")).devices.ravel().tolist() == cpu_meshes.devices()


def test_too_few_devices_are_a_reason_to_skip() -> None:
    present = len(jax.devices("cpu"))
    assert f"needs {present + 1} CPU devices: JAX has {present}" in str(cpu_meshes.missing(present + 1))


def test_flags_of_the_caller_replace_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1 --xla_cpu_max_isa=AVX2")
    flags = xla_compiler.flags("--xla_cpu_max_isa=SSE4_2").split()
    assert "--xla_force_host_platform_device_count=1" in flags and xla_compiler.FOUR_DEVICES not in flags
    assert "--xla_cpu_max_isa=SSE4_2" in flags and "--xla_cpu_max_isa=AVX2" not in flags
    assert set(xla_compiler.QUICK_FLAGS.split()) <= set(flags)
    assert not set(xla_compiler.QUICK_FLAGS.split()) & set(xla_compiler.flags(quick=False).split())
