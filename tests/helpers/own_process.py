"""Runs Python text in a separate process, which shares no state with this one."""

import subprocess
import sys


def in_its_own_process(script, **environment):
    """Runs Python text on the CPU in a separate process, which shares no state with this one."""
    paths = ":".join(path for path in sys.path if path)
    env = {"PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
