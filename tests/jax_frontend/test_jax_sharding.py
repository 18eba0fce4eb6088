"""Attention over several devices, which need a process of their own: XLA counts its devices when it starts."""

import subprocess
import sys
from pathlib import Path

import pytest
import xla_compiler

pytest.importorskip("flax")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_on_four_devices():
    paths = ":".join(path for path in sys.path if path)
    env = {
        **{"PATH": "", "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        **xla_compiler.cpu(),
        "XLA_FLAGS": xla_compiler.flags("--xla_force_host_platform_device_count=4"),
    }
    checks = Path(__file__).with_name("four_devices.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(checks)]
    found = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout and "skipped" not in found.stdout
