"""Where the compiled library is that calls torch's operators from programs of XLA.

``operator_call.cc`` is compiled on the user's machine by ``jax_frontend.compile_operator_lane``, once for each version
of torch and jaxlib.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from attn_core.backends.shared.programs.private_folder import UnsafeFolderError, private_folder

SOURCE = Path(__file__).with_name("operator_call.cc")
LIMIT = 600
"""Seconds that the compiler may take; usual are 20 to 60."""


def library_path() -> Path:
    """Returns where the library of the installed versions is, or would be.

    Raises:
        OSError, UnsafeFolderError: see ``private_folder``.
    """
    state = SOURCE.stat()
    return private_folder("operators") / _file_name(state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _file_name(changed: int, size: int) -> str:
    """Returns the name of the library, which says what it was compiled from.

    Reading the versions takes 1.5 ms, and each new plan asks for several backends. Versions of a process do not change.

    Args:
        changed, size: of the source, so that a changed source has another name.
    """
    versions = [metadata.version(name) for name in ("torch", "jaxlib")]
    about = "|".join((SOURCE.read_text(), *versions, sys.platform))
    return f"operator_call-{hashlib.sha256(about.encode()).hexdigest()[:24]}.so"


def missing() -> str | None:
    """Returns why no program can call torch's operators here; None if the library is there."""
    try:
        if library_path().exists():
            return None
    except (OSError, UnsafeFolderError, metadata.PackageNotFoundError) as error:
        return f"torch's operator needs a compiled library: {error}"
    return "torch's operator needs a compiled library: run jax_frontend.compile_operator_lane() once on this machine"


def compile_library(xla_headers: str) -> Path:
    """Compiles the library unless it is there, and returns its path. Of several processes one compiles.

    Args:
        xla_headers: the folder of the headers of XLA's foreign function interface.

    Raises:
        RuntimeError: if there is no compiler, or it fails; the message has its output.
    """
    path = library_path()
    if path.exists():
        return path
    command = _command(xla_headers)
    with _alone_in(path.parent), tempfile.TemporaryDirectory(dir=path.parent) as folder:
        if path.exists():  # compiled by the process that this one waited for
            return path
        unfinished = Path(folder) / path.name
        try:
            result = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, timeout=LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{command[0]}: {error}") from error
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
        os.replace(unfinished, path)  # in one step, because others look for the file without waiting
    return path


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits, asleep, until no other process is in a block for the same folder. The system ends the turn of a process
    that dies."""
    import fcntl  # this module is imported everywhere, and Windows has none

    descriptor = os.open(folder, os.O_RDONLY)  # closed in the compiler, which must not prolong the turn
    try:
        with suppress(OSError):  # a file system without locks: then every process compiles
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _command(xla_headers: str) -> list[str]:
    """Returns the compiler's command without the name of its output. Raises RuntimeError without a compiler."""
    import torch

    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{compiler}: not found; install a C++ compiler, or name one in the variable CXX")
    root = Path(torch.__file__).parent
    headers, libraries = [root / "include", Path(xla_headers)], ["c10", "torch_cpu"]
    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-std=c++20", "-O2", "-fPIC"]
    if torch.version.cuda is not None:
        headers.append(_cuda_headers())
        libraries += ["c10_cuda", "torch_cuda"]
        flags.append("-DATTN_CORE_CUDA")
    links = ["-L", str(root / "lib"), f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in libraries)]
    return [compiler, "-shared", *flags, *(f"-isystem{folder}" for folder in headers), str(SOURCE), *links]


def _cuda_headers() -> Path:
    """Returns the folder of CUDA's headers. Raises RuntimeError if there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    folders = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    for package in ("cu13", "cuda_runtime"):  # NVIDIA's wheels
        folders += [Path(place) / "nvidia" / package / "include" for place in sys.path]
    for folder in folders:
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    raise RuntimeError("cuda_runtime_api.h: not found; install CUDA's toolkit, or set CUDA_HOME")
