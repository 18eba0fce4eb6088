"""Runs the tutorials, each in a fresh kernel, and writes their outputs back: ``make tutorials``.

    python -m tools.tutorials [NAME ...]

A kernel runs in an empty folder, on the CPU, with the packages of this repository. It reads and writes nothing in the
user's home except for matplotlib's fonts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs/tutorials"
TIMEOUT = 300
"""Seconds that one cell may take on a busy machine. A whole tutorial takes less than 60 on an idle one."""
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
"""The metadata of every tutorial. A kernel would add the version of its Python, which is no news."""


def paths() -> list[Path]:
    """Returns the tutorials, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def main(arguments: list[str] | None = None) -> None:
    """Runs the tutorials of these names, or all of them, and writes each with its outputs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the name of a tutorial's file, without .ipynb")
    names = parser.parse_args(arguments).names
    if unknown := set(names) - {path.stem for path in paths()}:
        parser.error(f"no such tutorial: {', '.join(sorted(unknown))}; docs/tutorials has {[p.stem for p in paths()]}")
    for path in paths():
        if not names or path.stem in names:
            start = time.perf_counter()
            nbformat.write(executed(read(path)), path)
            print(f"{path.stem}: {time.perf_counter() - start:.0f} s")


def read(path: Path) -> NotebookNode:
    """Returns a notebook, checked against the format's schema."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def executed(notebook: NotebookNode) -> NotebookNode:
    """Runs every cell in a fresh kernel and returns the notebook with the outputs; the argument is changed, too.

    Raises:
        CellExecutionError: if a cell raises. The message has the cell and the traceback.
    """
    with TemporaryDirectory(prefix="tutorial-") as name:
        folder = Path(name)
        work = folder / "work"
        work.mkdir()
        kernel = AsyncKernelManager(
            # Without folders of kernels, the kernel is this very Python.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(folder / "kernel.json"),
            transport="ipc",  # two kernels that start at the same time could choose the same port
        )
        client = NotebookClient(
            notebook,
            timeout=TIMEOUT,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(work)}},
        )
        client.km = kernel  # not as an argument, because then the client would not end the kernel
        client.execute(env=_environment(folder))
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def _environment(folder: Path) -> dict[str, str]:
    """Returns the environment of a kernel: this one, on the CPU, with IPython's files in a folder."""
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "IPYTHONDIR": str(folder / "ipython"),
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
    }
    return {name: value for name, value in os.environ.items() if name != "MPLBACKEND"} | changed


if __name__ == "__main__":
    sys.exit(main())
