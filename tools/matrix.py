"""Runs a short suite on other versions of Python, the frameworks and their hosts: ``make matrix``. Prints a table.

Each environment is built in ``.matrix/`` with pip, and kept: a later run only installs what changed. An environment
whose Python is not on this machine is skipped, with the reason. Those that download gigabytes need ``--all``.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from typing import NamedTuple

from tools.environments import ROOT, build, interpreter, run

FOLDER = ROOT / ".matrix"
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "pytest-random-order", "hypothesis", "psutil", "ml_dtypes")

CORE = (
    "tests/call/test_masks.py",
    "tests/call/test_seq_info.py",
    "tests/call/test_spec.py",
    "tests/selection/test_tables.py",
    "tests/paged/test_page_allocator.py",
    "tests/paged/test_page_allocator_model.py",
    "tests/paged/test_paged_tables.py",
    "tests/repository/test_missing_packages.py",
    "tests/faults/test_subinterpreters.py",
)
FREE_THREADED = ("tests/faults/test_free_threading.py", *CORE)
JAX = ("tests/jax_frontend/test_jax_precision.py", "tests/jax_frontend/test_jax_symbols.py")
TORCH = ("tests/torch_frontend/test_heads_first.py", "tests/backends/test_sdpa_flash_shortcut.py")
HOSTS = (
    "tests/dropins/test_huggingface_documents.py",
    "tests/dropins/test_huggingface_models.py",
    "tests/dropins/test_huggingface_selected.py",
)
DIFFUSERS = ("tests/dropins/test_diffusers.py",)  # its helpers need JAX, too
ALL = CORE + JAX + TORCH + HOSTS + DIFFUSERS

CUDA = "downloads torch with CUDA, about 3 GB, if pip finds no wheel for the CPU"


class Environment(NamedTuple):
    """One row of the table.

    Attributes:
        extras: of attn-core, with commas; may be empty.
        packages: further requirements, such as the exact version of a framework.
        tests: the files to run.
        framework: the package whose version the table shows.
        large: why the row runs with ``--all`` only; empty if it always runs.
    """

    python: str
    extras: str
    packages: tuple[str, ...]
    tests: tuple[str, ...]
    framework: str
    large: str = ""

    @property
    def name(self) -> str:
        extras = self.extras.split(",") if self.extras else []
        return "-".join([self.python, *extras, *(re.sub(r"\W+", "", each) for each in self.packages)])


ENVIRONMENTS = (
    Environment("3.11", "cli,jax", ("jax==0.10.2",), CORE + JAX, "jax"),
    Environment("3.12", "cli,jax", ("jax==0.11.2",), CORE + JAX, "jax"),
    Environment("3.12", "cli,jax", (), CORE + JAX, "jax"),
    Environment("3.13", "cli,jax", (), CORE + JAX, "jax"),
    Environment("3.13", "cli", (), CORE, "numpy"),
    # Without extras: flax, jax-tvm-ffi and matplotlib need packages that have no wheel for this build of Python.
    Environment("3.13t", "", ("jax==0.10.2", "typer", "rich"), FREE_THREADED, "jax"),
    Environment("3.11", "cli,torch", ("torch==2.11.0",), CORE + TORCH, "torch", CUDA),
    Environment("3.11", "cli,torch", ("torch==2.13.0",), CORE + TORCH, "torch"),
    Environment("3.12", "cli,torch", (), CORE + TORCH, "torch", CUDA),
    Environment("3.13", "cli,torch", (), CORE + TORCH, "torch", CUDA),
    Environment("3.11", "cli,hf", ("torch==2.13.0", "transformers==5.17.0"), CORE + HOSTS, "transformers"),
    Environment("3.11", "cli,hf", ("torch==2.13.0",), CORE + HOSTS, "transformers"),
    Environment("3.11", "cli,diffusers,hf,jax", ("torch==2.13.0",), CORE + DIFFUSERS, "diffusers"),
    # The newest JAX beside torch: Python 3.11 has none after 0.10.2.
    Environment("3.12", "cli,diffusers,hf,jax", ("torch==2.13.0",), ALL, "jax", CUDA),
)
"""A package without a version is the newest one that pip finds for that Python."""


def result_of(environment: Environment, pip_args: list[str], large: bool) -> tuple[str, str]:
    """Returns (the framework's version, the closing line of pytest or why there is none)."""
    if environment.large and not large:
        return "", f"not run: {environment.large}; --all runs it"
    base = interpreter(environment.python)
    if base is None:
        return "", f"skipped: no Python {environment.python} here"
    folder = FOLDER / environment.name
    try:
        project = f"{ROOT}[{environment.extras}]" if environment.extras else str(ROOT)
        packages = (project, *environment.packages, *TEST_TOOLS)
        # The newest versions of some packages have no wheels for free-threaded builds; pip takes older ones then.
        wheels = ["--only-binary=:all:"] if environment.python.endswith("t") else []
        own = build(folder, base, *packages, pip_args=[*pip_args, *wheels], keep=True)
    except subprocess.CalledProcessError as error:
        return "", f"FAILED: pip: {error.stdout.strip().splitlines()[-1]}"
    program = f"from importlib.metadata import version; print(version({environment.framework!r}))"
    version = run(own, "-c", program).strip()
    options = ("-q", "-p", "no:cacheprovider", "-n", "2")
    # The tests import the sources from this folder, and everything else from the environment.
    done = subprocess.run(
        [own, "-m", "pytest", *options, *environment.tests], cwd=ROOT, capture_output=True, text=True, check=False
    )
    (FOLDER / f"{environment.name}.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    closing = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    return version, closing if done.returncode == 0 else f"FAILED: {closing}; see .matrix/{environment.name}.log"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="only this version, such as 3.12")
    parser.add_argument("--only", default="*", help="a pattern of names, such as '*-jax*'")
    parser.add_argument("--all", action="store_true", help="also the environments that download gigabytes")
    parser.add_argument("--list", action="store_true", help="print the names and build nothing")
    parser.add_argument("--pip-args", default="", type=shlex.split, help="options of pip install")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in ENVIRONMENTS
        if fnmatchcase(each.name, arguments.only) and arguments.python in (None, each.python)
    ]
    if arguments.list or not chosen:
        print(*(each.name for each in chosen or ENVIRONMENTS), sep="\n")
        sys.exit(not chosen)
    FOLDER.mkdir(exist_ok=True)
    print("| environment | version | result | seconds |\n|---|---|---|---|")
    failed = False
    for environment in chosen:
        began = time.monotonic()
        version, result = result_of(environment, arguments.pip_args or [], arguments.all)
        failed |= result.startswith("FAILED")
        shown = f"{environment.framework} {version}".strip() if version else ""
        print(f"| {environment.name} | {shown} | {result} | {time.monotonic() - began:.0f} |", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
