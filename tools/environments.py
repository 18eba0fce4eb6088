"""Virtual environments for the tools: built with the standard library and pip alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def interpreter(version: str) -> str | None:
    """Returns the path of a Python ``"3.12"``: from PATH, or from pyenv's folder; None if there is none that runs.

    Args:
        version: with a "t" at its end, a free-threaded build.
    """
    named = shutil.which(f"python{version}")
    installed = sorted((Path.home() / ".pyenv/versions").glob(f"{version.rstrip('t')}.*/bin/python"))
    for path in [sys.executable, *([named] if named else []), *map(str, reversed(installed))]:
        program = "import sys, sysconfig; free = sysconfig.get_config_var('Py_GIL_DISABLED')"
        program += "; print('%d.%d' % sys.version_info[:2] + 't' * bool(free))"
        done = subprocess.run([path, "-I", "-c", program], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def build(folder: Path, python: str, *requirements: str, pip_args: list[str], keep: bool = False) -> str:
    """Builds an environment with the requirements installed, and returns the path of its Python.

    With ``keep`` an environment that is already in the folder stays, and pip only adds to it.

    Raises:
        subprocess.CalledProcessError: with pip's output in ``stdout``.
    """
    subprocess.run([python, "-m", "venv", *([] if keep else ["--clear"]), str(folder)], check=True)
    own = str(folder / "bin/python")
    if requirements:
        run(own, "-m", "pip", "install", "--quiet", *pip_args, *requirements)
    return own


def run(*command: str, folder: Path = ROOT) -> str:
    """Runs a command and returns what it printed.

    Raises:
        subprocess.CalledProcessError: if it fails; its output is in ``stdout``.
    """
    done = subprocess.run(command, cwd=folder, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.stdout
