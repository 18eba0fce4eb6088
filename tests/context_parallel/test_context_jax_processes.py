"""Context parallelism in JAX over the devices of two processes."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xla_compiler

from attn_core import Target

pytest.importorskip("flax")

PATHS = {"PYTHONPATH": ":".join(path for path in sys.path if path)}
ON_CPU = {**PATHS, "PATH": "", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "OMP_NUM_THREADS": "1"}
ON_CPU |= xla_compiler.cpu()
TWO_DEVICES = "--xla_force_host_platform_device_count=2"  # as context_jax_processes.py says to JAX


def in_processes(folder, count, device, backend, **environment):
    """Runs ``context_jax_processes.py`` in ``count`` processes at once; returns their exit codes and output."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("context_jax_processes.py"))
    started, said = [], [folder / f"{rank}.txt" for rank in range(count)]
    for rank, path in enumerate(said):
        command = [sys.executable, script, str(rank), str(count), port, device, backend]
        with path.open("w") as file:
            started.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))
    end = time.monotonic() + 400
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        time.sleep(0.1)
    for process in started:
        process.kill()
    return [process.wait() for process in started], [path.read_text() for path in said]


@pytest.mark.slow
def test_two_processes_share_a_row(tmp_path):
    codes, said = in_processes(tmp_path, 2, "cpu", "math", **ON_CPU, XLA_FLAGS=xla_compiler.flags(TWO_DEVICES))
    assert codes == [0, 0], "\n".join(text[-3000:] for text in said)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others_with_an_error(tmp_path):
    codes, said = in_processes(tmp_path, 2, "dies", "", **ON_CPU)
    assert all("called" in text and "waited" not in text for text in said), said
    assert codes[1] == 3 and codes[0] not in (0, 3) and "heartbeat" in said[0], said[0][-3000:]


@pytest.mark.cuda
@pytest.mark.two_gpus
@pytest.mark.parametrize("backend", ["flash3", "flash4", "flash2", "sdpa_flash"])
def test_a_process_for_each_gpu(backend, tmp_path):
    if reason := dict(Target.here("jax", "sm90").unavailable).get(backend, ""):
        pytest.skip(reason)
    environment = {**os.environ, **PATHS, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    codes, said = in_processes(tmp_path, 2, "cuda", backend, **environment)
    assert codes == [0, 0], "\n".join(text[-3000:] for text in said)
