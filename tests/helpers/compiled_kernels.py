"""Code of Triton kernels for an H100 or H200, which a machine without a GPU can compile but not run."""

from __future__ import annotations

from typing import Any


def compiled(kernel: Any, tensors: dict[str, str], description: Any) -> Any:
    """Compiles a launch for sm90 as Triton would; ``tensors`` are the types that their names point to."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    _, numbers, constants = description
    options = {name: constants[name] for name in constants if name not in kernel.arg_names}
    constants = {name: constants[name] for name in constants if name in kernel.arg_names}
    names = [name for name in kernel.arg_names if name not in constants]
    assert len(names) == len(tensors) + len(numbers) and list(tensors) == names[: len(tensors)]
    signature = {name: f"*{kind}" for name, kind in tensors.items()}
    signature |= dict(zip(names[len(tensors) :], ["fp32" if type(n) is float else "i32" for n in numbers], strict=True))
    signature |= dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in tensors}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
