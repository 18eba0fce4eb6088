"""Context parallelism in JAX, over four devices, which need a process of their own: XLA counts them when it starts."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")


@pytest.mark.timeout(1800)
def test_on_four_devices():
    paths = ":".join(path for path in sys.path if path)
    env = {
        **{"PATH": "", "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1"},
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    }
    checks = Path(__file__).with_name("context_jax_worker.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=8", str(checks)]
    found = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    assert " passed" in found.stdout and "skipped" not in found.stdout
