"""Records the kernels that FlashAttention-4 would launch for a call, without compiling or launching them.

flash-attn-4 makes all its own choices: its entry points run once per spec on tensors without memory (torch's
FakeTensorMode, which flash-attn-4 itself uses to compile ahead). They run in a private copy of their module, in which
the compiler and the caches record each kernel, its compilation arguments and its call arguments.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.interface``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib import util
from typing import Any, NamedTuple

from attn_core.backends.flash4.own_kernels import OPTIONS, OwnKernel, described
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import Unrecordable
from attn_core.backends.shared.programs.operator_recorder import without_memory
from attn_core.call.after_fork import free_in_children

_FIRST_ADDRESS = 2**62
"""Numbers from here on stand for addresses; no GPU has such addresses."""


class RecordedKernel(NamedTuple):
    """The arguments of ``cute.compile`` for a kernel."""

    kernel: Any
    described: tuple[Any, ...]
    """The kernel's arguments without values: descriptions of tensors, numbers, None; the stream is the last."""
    options: str | None


class Launch(NamedTuple):
    """A launch of a kernel. key: identifies the compiled kernel in flash-attn-4's cache."""

    kernel: RecordedKernel
    key: str
    arguments: tuple[Any, ...]


class AddressOf:
    """An argument of a kernel that is the address of a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class Recorder:
    """A context in which tensors have no memory, and flash-attn-4's entry points record instead of launching.

    It is a lane for our own kernels (see ``own_kernels``), which it records, too.

    Attributes:
        kernels: ``(_flash_attn_fwd, _flash_attn_bwd)``, the recording entry points.
        calls: the kernels that they would have launched, in order.
        operations: ``(name, result)`` of every torch operation since ``watch``.
    """

    TAKES_VIEWS = False

    def __init__(self) -> None:
        self.calls: list[Launch] = []
        self._addressed: list[Any] = []
        self.operations: list[tuple[str, Any]] = []
        self._stack = ExitStack()
        self.kernels: tuple[Any, Any] = (None, None)

    def __enter__(self) -> Recorder:
        with ExitStack() as stack:  # an error below unwinds whatever was entered
            stack.enter_context(_recording)
            copy = _private_copy()
            for name, function in vars(copy).items():
                # flash-attn-4 keeps a function's compiled kernels in an attribute of the function.
                if hasattr(function, "compile_cache"):
                    function.compile_cache = _NotingCache(name, self._note)
            self.kernels = copy._flash_attn_fwd, copy._flash_attn_bwd
            stack.enter_context(without_memory())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def launch(self, kernel: OwnKernel, arguments: tuple[Any, ...]) -> None:
        """Records the launch of a kernel of ours."""
        self._note(RecordedKernel(kernel.code(), described(arguments), OPTIONS), kernel.name, arguments)

    def address(self, tensor: Any) -> Any:
        """Returns a number that stands for the address of a tensor; a recorded launch holds an ``AddressOf``."""
        from cutlass import Int64

        self._addressed.append(tensor)
        return Int64(_FIRST_ADDRESS + len(self._addressed) - 1)

    def _note(self, kernel: RecordedKernel, key: str, arguments: tuple[Any, ...]) -> None:
        self.calls.append(Launch(kernel, key, self._with_addresses(arguments)))

    def _with_addresses(self, value: Any) -> Any:
        """Returns an argument with an ``AddressOf`` for each number that stands for an address."""
        if isinstance(value, (tuple, list)):
            parts = [self._with_addresses(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        number = getattr(value, "value", None)
        if isinstance(number, int) and number >= _FIRST_ADDRESS:
            return AddressOf(self._addressed[number - _FIRST_ADDRESS])
        return value

    def watch(self) -> None:
        """Starts recording torch operations. Launch it after the operands exist."""
        self._stack.enter_context(watching(self.operations))


class _NotingCompiler:
    """Replaces ``cutlass.cute`` in the private copy. Its ``compile`` only records."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def compile(self, kernel: Any, *described: Any, options: str | None = None) -> RecordedKernel:
        return RecordedKernel(kernel, described, options)


class _NotingCache:
    """A cache that looks empty, so that every kernel is requested, and returns kernels that record their calls."""

    def __init__(self, name: str, note: Callable[[RecordedKernel, str, tuple[Any, ...]], None]) -> None:
        self._name, self._note = name, note
        self._kernels: dict[Any, RecordedKernel] = {}

    def __contains__(self, key: Any) -> bool:
        return False

    def __setitem__(self, key: Any, kernel: RecordedKernel) -> None:
        self._kernels[key] = kernel

    def __getitem__(self, key: Any) -> Callable[..., None]:
        return lambda *arguments: self._note(self._kernels[key], f"{self._name} {key!r}", arguments)


_recording = free_in_children(threading.Lock())
"""Held during a recording, because all recordings share the private copy."""


@cached_once
def _private_copy() -> Any:
    copy = private_copy("flash_attn.cute._attn_core_program")
    vars(copy).update(
        cute=_NotingCompiler(copy.cute),
        is_fake_mode=lambda: False,  # in fake mode it would stop after compiling, before the launch that we record
    )
    return copy


def private_copy(name: str) -> Any:
    """Imports flash_attn.cute.interface again under another name, so that changes to it affect no other caller."""
    from flash_attn.cute import interface  # type: ignore[import-not-found]

    spec = util.spec_from_file_location(name, interface.__file__)
    if spec is None or spec.loader is None:
        raise Unrecordable(f"no source of {interface.__name__}")
    copy = util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def watching(operations: list[tuple[str, Any]]) -> Any:
    """Returns a context that notes the name and the result of every torch operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            operations.append((str(function), result))
            return result

    return Watch()
