"""Operators of torch as steps of a program: XLA calls a small library of ours, which calls torch's dispatcher.

``attn_core.backends.shared.programs.operator_program`` says which operators. The launches are no part of a CUDA graph,
because torch allocates memory for them.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import jax

from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.backends.shared.programs.operator_library import compile_library, library_path, missing


def compile_operator_lane() -> Path:
    """Compiles the library that lets JAX's programs call torch's operators without Python; returns its path.

    Needs a C++ compiler (``$CXX``, else ``g++``) and, with a torch for GPUs, CUDA's headers. If the library of the
    installed torch and jaxlib is in the user's cache folder already, nothing is compiled. Functions that were traced
    before keep their callbacks.

    Raises:
        RuntimeError: if there is no compiler, or it fails; the message has its output.
    """
    path = compile_library(jax.ffi.include_dir())
    _registered.cache_clear()
    _kept.clear()
    return path


def register() -> None:
    """Registers the library's custom calls with XLA, once.

    Raises:
        Unrecordable: if the library has not been compiled, or cannot be loaded.
    """
    error = _registered()
    if error is not None:
        raise Unrecordable(error)


_kept: set[str] = set()
"""The names of the kernels that the library knows."""


def keep_kernels(functions: dict[str, Any]) -> None:
    """Makes functions of TVM known to the registered library, by their names. The caller keeps the functions."""
    new = {name: function for name, function in functions.items() if name not in _kept}
    if not new:
        return
    import tvm_ffi

    tvm, library = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi()), ctypes.CDLL(str(library_path()))
    library.attn_core_keep_kernel.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    interface = [ctypes.cast(each, ctypes.c_void_p) for each in (tvm.TVMFFIFunctionCall, tvm.TVMFFIEnvSetStream)]
    for name, function in new.items():
        library.attn_core_keep_kernel(name.encode(), function.__chandle__(), *interface)
        _kept.add(name)


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
    for name, platform in (("cpu", "cpu"), ("gpu", "CUDA")):
        handler = getattr(library, f"attn_core_operator_{name}", None)  # a torch without CUDA has none for a GPU
        if handler is not None:
            jax.ffi.register_ffi_target(OPERATOR, jax.ffi.pycapsule(handler), platform=platform)
    return None


@cached_once
def number_devices() -> None:
    """Tells the registered library JAX's number of each GPU of this process: texts name devices of all processes.

    Call it while JAX lowers a program: before, the processes of a program may not know each other yet. Later calls do
    nothing.
    """
    try:
        devices = jax.local_devices(backend="gpu")
    except RuntimeError:  # there is none
        return
    library = ctypes.CDLL(str(library_path()))
    for device in devices:
        library.attn_core_set_device(ctypes.c_int64(device.local_hardware_id), ctypes.c_int64(device.id))
