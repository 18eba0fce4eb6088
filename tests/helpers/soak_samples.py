"""What ``soak`` reads from the process now and then: memory, descriptors, threads, handlers, caches."""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import signal
import sys
import threading
import warnings
from typing import Any

import caches
import psutil

_PROCESS = psutil.Process()


def sample() -> dict[str, Any]:
    """Returns one reading, after a garbage collection.

    ``resident``, ``allocated`` and ``device`` are bytes. ``blocks`` counts the small pieces of memory that Python
    objects have, to the single object; pages of resident memory are too coarse to see a small leak early.
    """
    gc.collect()
    return {
        "resident": _PROCESS.memory_info().rss,
        "allocated": _allocated(),
        "blocks": sys.getallocatedblocks(),
        "objects": _objects(),
        "descriptors": _PROCESS.num_fds(),
        "threads": _PROCESS.num_threads(),
        "Python threads": threading.active_count(),
        "handlers": handlers(),
        "caches": caches.sizes(),
        "device": device_bytes(),
    }


class _Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _allocated() -> int | None:
    """Returns the bytes that malloc has handed out; None without glibc. Unlike ``resident`` it has no free memory."""
    try:
        read = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    read.restype = _Mallinfo
    found = read()
    return int(found.uordblks + found.hblkhd)


def _objects() -> int:
    """Returns how many objects of our packages' types the garbage collector knows."""
    return sum(str(type(each).__module__).partition(".")[0] in caches.PACKAGES for each in gc.get_objects())


def handlers() -> dict[str, int]:
    """Returns how many functions wait to be called: by signals, at exit, by loggers, by torch and so on."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    counts = {
        "signals": sum(callable(signal.getsignal(number)) for number in signal.valid_signals()),
        "atexit": atexit._ncallbacks(),
        "logging": sum(len(getattr(logger, "handlers", ())) for logger in loggers),
        "loggers": len(loggers),
        "warning filters": len(warnings.filters),
        "garbage collection": len(gc.callbacks),
        "imports": len(sys.meta_path),
    }
    if "torch" in sys.modules:
        counts |= _torch_hooks()
    return counts


def _torch_hooks() -> dict[str, int]:
    import torch

    modules = torch.nn.modules.module
    names = [name for name in vars(modules) if name.startswith("_global_") and name.endswith("_hooks")]
    return {
        "module hooks": sum(len(getattr(modules, name)) for name in names),
        "hooks on saved tensors": int(torch._C._autograd._top_saved_tensors_default_hooks(True) is not None),
        "torch function modes": torch._C._len_torch_function_stack(),
        "torch dispatch modes": torch._C._len_torch_dispatch_stack(),
    }


def device_bytes() -> dict[str, int]:
    """Returns the bytes of a GPU that each framework uses; empty on a CPU."""
    found = {}
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            found["torch allocated"] = torch.cuda.memory_allocated()
            found["torch reserved"] = torch.cuda.memory_reserved()
    if "jax" in sys.modules:
        import jax

        statistics = jax.local_devices()[0].memory_stats() or {}
        found |= {f"jax {name}": statistics[name] for name in ("bytes_in_use",) if name in statistics}
        found["jax arrays"] = len(jax.live_arrays())
    return found
