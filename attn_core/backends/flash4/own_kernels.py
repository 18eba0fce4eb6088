"""Our own kernels of the CuTe DSL: compiled once, and launched on torch's current stream, or recorded.

This module is the usual ``Lane``, and ``recording.Recorder`` the other one. Upstream: nvidia-cutlass-dsl 4.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from attn_core.backends.flash4 import disk_cache
from attn_core.backends.shared.caches import cached_once
from attn_core.call.observe import timed

if TYPE_CHECKING:
    from cutlass import Int64
    from torch import Tensor

TAKES_VIEWS = True
OPTIONS = "--enable-tvm-ffi"


class OwnKernel(NamedTuple):
    """A kernel of ours.

    Attributes:
        name: says everything that the compiled code depends on.
        code: returns the function of the CuTe DSL, of the launch's arguments and the stream.
    """

    name: str
    code: Callable[[], Any]


Arguments = tuple[Any, ...]
"""Tensors, None, ints, and tuples of numbers of the CuTe DSL."""


class Lane(Protocol):
    """How a call's kernels are launched: flash-attn-4's by its entry points, ours by ``launch``.

    Attributes:
        TAKES_VIEWS: whether a kernel may take views of one tensor. In a program of XLA each has memory of its own.
    """

    TAKES_VIEWS: bool

    def entry_points(self) -> tuple[Any, Any]: ...
    def launch(self, kernel: OwnKernel, arguments: Arguments) -> None: ...
    def address(self, tensor: Tensor) -> Int64: ...


_compiled: dict[str, Any] = {}
"""The compiled kernels of this process by name."""


@cached_once
def entry_points() -> tuple[Any, Any]:
    """Returns flash-attn-4's ``(_flash_attn_fwd, _flash_attn_bwd)``."""
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd


def launch(kernel: OwnKernel, arguments: Arguments) -> None:
    """Launches a kernel on torch's current stream; the first launch compiles it."""
    function = _compiled.get(kernel.name)
    if function is None:
        function = _compiled[kernel.name] = compiled(kernel, arguments)
    function(*arguments)


def address(tensor: Tensor) -> Int64:
    """Returns the address of a tensor as a kernel takes it."""
    from cutlass import Int64

    return Int64(tensor.data_ptr())


def compiled(kernel: OwnKernel, arguments: Arguments) -> Callable[..., None]:
    """Returns the compiled kernel, as kept on disk or new."""
    from cutlass import cute

    code = compiled_code()
    if kernel.name not in code:  # neither in this process nor on disk, and storing it writes the disk
        with timed("flash4", kernel.name):
            code[kernel.name] = cute.compile(kernel.code(), *described(arguments), options=OPTIONS)
    return code[kernel.name]


def described(arguments: Arguments, alignment: int = 4) -> Arguments:
    """Returns what a kernel is compiled for: tensors of any sizes, any numbers, and the stream of the environment.

    Args:
        alignment: of the addresses of tensors, in bytes.
    """
    from cutlass import Int32, cute
    from flash_attn.cute.cute_dsl_utils import to_cute_tensor

    def describe(value: Any) -> Any:
        if isinstance(value, int):  # its type counts, not its value
            return Int32(value)
        # A tuple has numbers of the DSL, which describe themselves.
        return value if value is None or isinstance(value, tuple) else to_cute_tensor(value, assumed_align=alignment)

    return *map(describe, arguments), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)


@cached_once
def compiled_code() -> Any:
    """Returns the compiled code that we keep on disk, by name."""
    return disk_cache.named_cache("attn_core")
