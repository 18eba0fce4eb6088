"""The compiled code of one step of a program: a recorded kernel as a function of buffers alone.

Upstream: flash-attn-4 4.0.0b36 with nvidia-cutlass-dsl 4.8.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from attn_core.backends.flash4 import one_array
from attn_core.backends.flash4.own_kernels import compiled_code
from attn_core.backends.flash4.recorder import AddressOf, Launch
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.shared.programs.kernel_programs import Unrecordable


def compile_step(target: str, call: Launch, slots: list[tuple[int, int | None]], by_slot: list[Any]) -> Any:
    """Returns a ``tvm_ffi.Function`` of tensors alone that launches the kernel on the environment's stream."""
    import cutlass
    from cutlass import cute

    code = compiled_code()
    if target in code:
        return _function(code[target])
    kernel, arguments = call.kernel, call.arguments

    # Numbers are captured, so they become constants of the compiled code, and XLA passes buffers only.
    def launch(stream: Any, tensors: Any) -> None:
        places, filled = iter(slots), []
        for value, _ in leaves(call):
            if is_tensor(value):
                slot, part = next(places)
                filled.append(one_array.in_kernel(tensors[slot], part))
            elif isinstance(value, AddressOf):
                filled.append(tensors[next(places)[0]].iterator.toint())
            elif is_number(value):
                filled.append(_in_code(type(value)(value.value)))
            elif isinstance(value, float):
                filled.append(_in_code(cutlass.Float32(value)))
            elif isinstance(value, int) and not isinstance(value, bool):
                filled.append(cutlass.Int32(value))
            else:
                filled.append(value)
        rest = iter(filled)
        kernel.kernel(*(_rebuilt(value, about, rest) for value, about in zip(arguments, kernel.described)), stream)

    with warnings.catch_warnings():  # about an argument that flash-attn-4 leaves empty
        warnings.filterwarnings("ignore", "Argument aux_data ")
        compiled = cute.compile(_entry(), launch, kernel.described[-1], *by_slot, options=kernel.options)
    code[target] = compiled
    return _function(compiled)


def _in_code(number: Any) -> Any:
    """Returns a float as a value of the compiled code; other numbers as they are.

    The DSL computes with a number of Python in 64 bits. torch's launches pass it at run time, in 32 bits.
    """
    import cutlass

    return cutlass.Float32(number.ir_value()) if isinstance(number, cutlass.Float32) else number


def leaves(call: Launch) -> Iterator[tuple[Any, Any]]:
    """Yields a kernel's arguments with their descriptions; of a tuple or list, its parts."""
    pairs = [*zip(call.arguments, call.kernel.described)][::-1]
    while pairs:
        value, about = pairs.pop()
        if _is_group(value):
            pairs += [*zip(value, about, strict=True)][::-1]
        else:
            yield value, about


def _rebuilt(value: Any, about: Any, leaves: Iterator[Any]) -> Any:
    """Returns an argument as the kernel takes it, from its leaves. about: its description, which has the right type."""
    if not _is_group(value):
        return next(leaves)
    parts = [_rebuilt(part, of_part, leaves) for part, of_part in zip(value, about, strict=True)]
    return type(about)(*parts) if hasattr(about, "_fields") else type(about)(parts)


def _is_group(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and any(part is not None for part in value)


def _function(compiled: Any) -> Any:
    """Returns the TVM-FFI function of compiled code: the code itself, or a member if the code also takes keywords."""
    import tvm_ffi

    function = compiled if isinstance(compiled, tvm_ffi.Function) else getattr(compiled, "_tvm_ffi_function", None)
    if not isinstance(function, tvm_ffi.Function):
        raise Unrecordable(f"cute.compile gave {type(compiled).__name__}, which holds no TVM-FFI function")
    return function


@cached_once
def _entry() -> Any:
    import cutlass
    from cutlass import cute

    def entry(launch, stream, *tensors):  # type: ignore[no-untyped-def]
        launch(stream, tensors)

    entry.__annotations__ = {"launch": cutlass.Constexpr}  # text annotations would be looked up in this module
    return cute.jit(entry)


def is_number(value: Any) -> bool:
    """Returns whether an argument is a number of the CuTe DSL."""
    return isinstance(getattr(value, "value", None), (int, float))


def is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def tensor_of(value: Any) -> Any:
    """Returns the tensor that an argument is or points to; None for any other argument."""
    if isinstance(value, AddressOf):
        return value.tensor
    return value if is_tensor(value) else None
