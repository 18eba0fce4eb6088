"""Range: marks a part of a program on torch tensors for torch.profiler, and for Nsight Systems if ``ranges`` are on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar

from attn_core.backends.shared.caches import cached_once
from attn_core.call.observe import range_name, ranges_enabled
from attn_core.call.spec import AttentionSpec
from attn_core.errors import note_call

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class Range:
    """A range with a name; also a context manager, which ends the range if its block raises.

    torch's ``record_function`` alone serves torch.profiler, which also shows it above the GPU's kernels, and
    ``emit_nvtx``. It costs microseconds even if nobody listens, so callers ask ``is_on`` first.

    Args:
        nvtx: whether to emit an NVTX range of the same name.
    """

    def __init__(self, name: str, nvtx: bool) -> None:
        self.name, self.nvtx = name, nvtx

    def start(self) -> None:
        """Starts the range on this thread."""
        import torch

        self._record = torch.autograd.profiler.record_function(self.name)
        self._record.__enter__()
        # False from here on if this build has none, so that ``stop`` ends what was started.
        self.nvtx = self.nvtx and _push(self.name)

    def stop(self) -> None:
        """Ends the range; call it on the thread that started it."""
        import torch

        if self.nvtx:
            torch.cuda.nvtx.range_pop()
        self._record.__exit__(None, None, None)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def _push(name: str) -> bool:
    """Starts an NVTX range; returns False, with a warning, if this build of torch has no NVTX."""
    import torch

    try:
        torch.cuda.nvtx.range_push(name)
    except RuntimeError as error:
        warnings.warn(
            f"attn_core.ranges(True): this build of torch has no NVTX ({error}); use torch.profiler, which needs no "
            "switch, or a build for CUDA or ROCm",
            stacklevel=2,
        )
        return False
    return True


@cached_once
def _profiler() -> ModuleType:
    import torch.autograd.profiler

    return torch.autograd.profiler


def is_on() -> bool:
    """Returns whether somebody listens: a profiler of torch, or ``ranges(True)``."""
    return _profiler()._is_profiler_enabled or ranges_enabled()


def in_range(function: Callable[Parameters, Result], name: str, nvtx: bool) -> Callable[Parameters, Result]:
    """Wraps a function so that every call of it is a range."""

    def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        with Range(name, nvtx):
            return function(*arguments, **keywords)

    return run


def in_range_if_on(function: Callable[..., Result], backend: str, direction: str) -> Callable[..., Result]:
    """Wraps a backend's forward or backward: its call is a range whenever somebody listens, and is noted on errors."""

    def run(spec: AttentionSpec, *arguments: object) -> Result:
        try:
            if not is_on():
                return function(spec, *arguments)
            with Range(range_name(backend, spec, direction), ranges_enabled()):
                return function(spec, *arguments)
        except Exception as error:
            note_call(error, range_name(backend, spec, direction))
            raise

    return run
