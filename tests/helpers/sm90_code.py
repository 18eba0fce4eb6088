"""Compiles launches of Triton kernels for sm90 on a machine without a GPU, and reads their code."""

from __future__ import annotations

import re
from typing import Any


def compiled(kernel: Any, tensors: dict[str, str], description: Any, *, divisible: bool = False) -> Any:
    """Compiles a launch for sm90 as Triton would; ``tensors`` are the types that their names point to.

    divisible: say which numbers are multiples of 16, so that rows are copied 16 bytes at a time.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, numbers, constants = description
    options = {name: constants[name] for name in constants if name not in kernel.arg_names}
    constants = {name: constants[name] for name in constants if name in kernel.arg_names}
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(tensors) + len(numbers) and list(tensors) == names[: len(tensors)]
    values = dict(zip(names[len(tensors) :], numbers, strict=True))
    signature = {name: f"*{kind}" for name, kind in tensors.items()}
    signature |= {name: "fp32" if type(number) is float else "i32" for name, number in values.items()}
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    fixed = {parameter.name for parameter in kernel.params if not parameter.do_not_specialize}
    aligned = [*tensors]
    if divisible:
        aligned += [name for name, number in values.items() if type(number) is int and number % 16 == 0]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in fixed}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def loose_operations(code: Any) -> list[str]:
    """The operations that the compiler could fuse with others."""
    return re.findall(r"\b(?:mul|add|sub|fma)\.(?:ftz\.)?f32\b", code.asm["ptx"])


def is_in_order(code: Any, warps: int) -> bool:
    """Whether all keys of a row are in one warp, and nothing may be fused that the source does not fuse."""
    products = re.findall(r"#ttg.nvidia_mma<\{[^}]*warpsPerCTA = \[(\d+), (\d+)\]", code.asm["ttgir"])
    return bool(products) and set(products) == {(str(warps), "1")} and not loose_operations(code)
