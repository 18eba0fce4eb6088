"""Context parallelism in JAX over four devices, of one process or of two, which XLA counts when a process starts."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from attn_core import Target

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


def in_processes(count, device, backend, **environment):
    """Runs ``context_jax_processes.py`` so many times at once, and asserts that each is content."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    paths = ":".join(path for path in sys.path if path)
    script = str(Path(__file__).with_name("context_jax_processes.py"))
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(count), port, device, backend],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
            env={**environment, "PYTHONPATH": paths},
        )
        for rank in range(count)
    ]
    try:
        said = [process.communicate(timeout=400)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, "\n".join(text[-3000:] for text in said)


@pytest.mark.timeout(500)
def test_two_processes_share_a_row():
    flags = "--xla_backend_optimization_level=0"
    environment = {"PATH": "", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1"}
    in_processes(2, "cpu", "math", **environment, XLA_FLAGS=flags)


@pytest.mark.cuda
@pytest.mark.timeout(500)
@pytest.mark.parametrize("backend", ["flash3", "flash4", "flash2", "sdpa_flash"])
def test_a_process_for_each_gpu(backend):
    jax = pytest.importorskip("jax")
    if len(jax.devices("gpu")) < 2:
        pytest.skip("needs two GPUs")
    if reason := dict(Target.here("jax", "sm90").unavailable).get(backend, ""):
        pytest.skip(reason)
    in_processes(2, "cuda", backend, **{**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
