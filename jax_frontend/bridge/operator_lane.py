"""Operators of torch as steps of a program: XLA calls a small library of ours, which calls torch's dispatcher.

The library is ``operator_call.cc``, compiled on the user's machine by ``compile_operator_lane``: once for each version
of torch and jaxlib, never while the package is installed. It stays in the user's cache folder. Without it these calls
go by callback. The launches are no part of a CUDA graph, because torch allocates memory for them.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax

from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.kernel_programs import OPERATOR, Unrecordable
from attn_core.backends.shared.operator_library import SOURCE, library_path, missing

LIMIT = 600
"""Seconds that the compiler may take; usual are 20 to 60."""


def compile_operator_lane() -> Path:
    """Compiles the library that lets JAX's programs call torch's operators without Python; returns its path.

    Needs a C++ compiler (``$CXX``, else ``g++``) and, on a machine with a GPU, CUDA's headers. If the library of these
    versions is there already, nothing is compiled. Functions that were traced before keep their callbacks.

    Raises:
        RuntimeError: if there is no compiler, or it fails; the message has its output.
    """
    path = library_path()
    if path.exists():
        return path
    command = _command()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            result = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, timeout=LIMIT)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{command[0]}: {error}") from error
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr[-4000:]}")
        os.replace(made, path)  # another process may compile the same library meanwhile
    _registered.cache_clear()
    return path


def register() -> None:
    """Registers the library's custom calls with XLA, once.

    Raises:
        Unrecordable: if the library has not been compiled, or cannot be loaded.
    """
    error = _registered()
    if error is not None:
        raise Unrecordable(error)


@cached_once
def _registered() -> str | None:
    """Returns None after registering the library, or why it cannot be."""
    why = missing()
    if why is not None:
        return why
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the library {path.name} does not load: {error}"
    jax.ffi.register_ffi_target(OPERATOR, jax.ffi.pycapsule(library.attn_core_operator_cpu), platform="cpu")
    if _has_cuda():
        jax.ffi.register_ffi_target(OPERATOR, jax.ffi.pycapsule(library.attn_core_operator_gpu), platform="CUDA")
    return None


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None


def _command() -> list[str]:
    """Returns the compiler's command without the name of its output. Raises RuntimeError without a compiler."""
    import torch

    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise RuntimeError(f"{compiler}: not found; install a C++ compiler, or name one in the variable CXX")
    root = Path(torch.__file__).parent
    include = [root / "include", Path(jax.ffi.include_dir())]
    libraries, flags = ["c10", "torch_cpu"], []
    if _has_cuda():
        include += [_cuda_headers()]
        libraries += ["c10_cuda", "torch_cuda"]
        flags = ["-DATTN_CORE_CUDA"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-std=c++20", "-O2", "-fPIC"]
    links = ["-L", str(root / "lib"), f"-Wl,-rpath,{root / 'lib'}", *(f"-l{name}" for name in libraries)]
    places = [f"-isystem{folder}" for folder in include]
    return [compiler, "-shared", *flags, *places, str(SOURCE), *links]


def _cuda_headers() -> Any:
    """Returns the folder of CUDA's headers. Raises RuntimeError if there is none."""
    from torch.utils.cpp_extension import CUDA_HOME

    folders = [Path(CUDA_HOME) / "include"] if CUDA_HOME else []
    folders += sorted(Path(place) / "nvidia" / "cu13" / "include" for place in sys.path)
    folders += sorted(Path(place) / "nvidia" / "cuda_runtime" / "include" for place in sys.path)
    for folder in folders:
        if (folder / "cuda_runtime_api.h").exists():
            return folder
    raise RuntimeError("cuda_runtime_api.h: not found; install CUDA's toolkit, or set CUDA_HOME")
