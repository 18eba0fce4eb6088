"""What FlashAttention-4 would do, noted down instead of done.

None of flash-attn-4's own choices is repeated here. Its entry points run once for a spec on tensors without memory
(torch's FakeTensorMode, as flash-attn-4 does itself to compile ahead), in a private copy of their module whose compiler
and caches take notes instead: each kernel, what it is to be compiled for, and the arguments it would be called with.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from importlib import util
from typing import Any, NamedTuple

from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.kernel_programs import Unrecordable


class Kernel(NamedTuple):
    """A kernel as ``cute.compile`` is asked for it."""

    kernel: Any
    described: tuple[Any, ...]
    """Its arguments without values: descriptions of tensors, numbers, None; the stream is the last."""
    options: str | None


class Call(NamedTuple):
    kernel: Kernel
    key: str
    arguments: tuple[Any, ...]


class Recorder:
    """A context in which tensors have no memory, and ``kernels`` are flash-attn-4's entry points, which take notes.

    Attributes:
        kernels: ``(_flash_attn_fwd, _flash_attn_bwd)``.
        calls: the kernels that they would have called since, in order.
        operations: ``(name, result)`` of every torch operation since ``watch``.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.operations: list[tuple[str, Any]] = []
        self._stack = ExitStack()
        self.kernels: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Recorder:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with ExitStack() as stack:  # what goes wrong here leaves nothing behind
            stack.enter_context(_recording())
            copy = _private_copy()
            for name, function in vars(copy).items():
                if hasattr(function, "compile_cache"):
                    function.compile_cache = _NotingCache(name, self.calls)
            self.kernels = copy._flash_attn_fwd, copy._flash_attn_bwd
            stack.enter_context(FakeTensorMode())
            _warned()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def watch(self) -> None:
        """From now on every torch operation counts; operands are made before."""
        self._stack.enter_context(_watching(self.operations))


class _NotingCompiler:
    """``cutlass.cute`` for the private copy, whose ``compile`` compiles nothing."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def compile(self, kernel: Any, *described: Any, options: str | None = None) -> Kernel:
        return Kernel(kernel, described, options)


class _NotingCache:
    """A cache of compiled kernels that is always empty, and whose kernels note their calls."""

    def __init__(self, name: str, calls: list[Call]) -> None:
        self._name, self._calls = name, calls
        self._made: dict[Any, Kernel] = {}

    def __contains__(self, key: Any) -> bool:
        return False

    def __setitem__(self, key: Any, kernel: Kernel) -> None:
        self._made[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., None]:
        return lambda *arguments: self._calls.append(Call(self._made[key], f"{self._name} {key!r}", arguments))


@cached_once
def _warned() -> None:
    """Lets torch say here, to nobody, what it says once in a process: that a FakeTensor's address was asked for.

    cutlass asks for the addresses of all tensors that it is shown, those that have none among them.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.empty(1, device="cpu").data_ptr()


@cached_once
def _recording() -> threading.Lock:
    return threading.Lock()


@cached_once
def _private_copy() -> Any:
    """flash_attn.cute.interface once more, as a module of our own: nobody else's calls meet what is changed in it."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    spec = util.spec_from_file_location("flash_attn.cute._attn_core_program", interface.__file__)
    if spec is None or spec.loader is None:
        raise Unrecordable(f"no source of {interface.__name__}")
    copy = util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    vars(copy).update(
        cute=_NotingCompiler(copy.cute),
        is_fake_mode=lambda: False,  # so that it goes on to call what it has compiled
    )
    return copy


def _watching(operations: list[tuple[str, Any]]) -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = function(*args, **(kwargs or {}))
            operations.append((str(function), found))
            return found

    return Watch()
