"""A call as a list of kernels on buffers, as plain data that XLA runs without Python; and Triton kernels as its steps.

jaxlib has a custom call for Triton's kernels, which jax's own Pallas uses. It takes the PTX of a kernel and its
numbers, so a step needs no registration. The PTX is what torch's launches run.
Upstream: jaxlib 0.10.2 to 0.11.2, ``jaxlib.gpu_triton``, whose names are not public; triton 3.6. Where they are missing
or differ, ``step`` raises Unrecordable.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.triton import Description
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    import jax
    import torch
    from triton.compiler import CompiledKernel
    from triton.runtime import KernelInterface

SCRATCH = "scratch"
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv", "dqkv", "dsinks")}
"""The names of a call's results, of which a backward has some."""


class Unrecordable(RuntimeError):
    """A call cannot be expressed as kernels on buffers. The message says why."""


class Buffer(NamedTuple):
    """Contiguous memory of a program. An operand with a shorter last axis is padded with zeros, a result is cut.

    Attributes:
        name: the operand or result that it holds, or SCRATCH.
        dtype: as in a spec, "int32" or "bfloat16".
        zeros: whether it must be zero before the first step.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False


class KernelStep(NamedTuple):
    """One kernel of a program.

    Attributes:
        target: a name that covers everything that the compiled code depends on, the same in every process.
        reads: indices of the buffers that the kernel reads, into ``KernelProgram.buffers``, in its arguments' order.
        writes: indices of the buffers that the kernel writes; these arguments follow. A buffer in both is updated.
        compile: returns a ``tvm_ffi.Function`` of the tensors of reads and writes; takes about a second.
        attributes: of a step whose target XLA itself has, so that nothing is registered: returns the attributes of the
            custom call, after compiling the kernel; None for other steps.
    """

    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    compile: Callable[[], Any]
    attributes: Callable[[], dict[str, Any]] | None = None


class KernelProgram(NamedTuple):
    """The buffers and kernels of a call. Buffers that no step writes are operands; results carry their names."""

    buffers: tuple[Buffer, ...]
    steps: tuple[KernelStep, ...]


def operands_in_float32(spec: AttentionSpec, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands of a program that are not the call's own arrays, by name: sinks and slopes in float32."""
    return {name: arrays[name].astype("float32") for name in ("sinks", "alibi_slopes") if name in arrays}


TARGET = "triton_kernel_call_ffi"
"""jaxlib's name of the custom call."""
ALIGNMENT = 16
"""Bytes; XLA aligns all of its buffers to more."""
_NUMBERS = {"i1", "i8", "i16", "i32", "i64", "u32", "u64", "fp32", "fp64"}
"""Triton's types of numbers that jaxlib can pass."""


def step(
    kernel: KernelInterface,
    reads: tuple[int, ...],
    writes: tuple[int, ...],
    kinds: tuple[torch.dtype, ...],
    how: Description,
) -> KernelStep:
    """Returns a step that launches a Triton kernel on buffers.

    Args:
        kernel: its first arguments are the buffers of ``reads``, then those of ``writes``; then come numbers.
        reads, writes: places of buffers, which may repeat.
        kinds: torch's dtypes of these buffers.
        how: the grid, the numbers and the constants.

    Raises:
        Unrecordable: if this jaxlib has no such custom call.
    """
    _jaxlib()
    grid, numbers, constants = how
    frozen = grid, numbers, tuple(sorted(constants.items()))
    return KernelStep(TARGET, reads, writes, _nothing, lambda: _attributes(kernel, kinds, *frozen))


class Program:
    """The buffers of a program by name, and its steps so far."""

    def __init__(self, buffers: dict[str, Buffer]) -> None:
        self.buffers = buffers
        self.steps: list[KernelStep] = []

    def add(
        self, kernel: KernelInterface, reads: tuple[str, ...], writes: tuple[str, ...], how: Callable[..., Description]
    ) -> None:
        """Adds a kernel; ``how(tensors)`` describes its launch on tensors without memory.

        ``reads`` and ``writes`` are names of buffers; q stands for a buffer that the call does not have.
        """
        import torch

        place = {name: number for number, name in enumerate(self.buffers)}
        reads = tuple(name if name in self.buffers else "q" for name in reads)
        chosen = [self.buffers[name] for name in (*reads, *writes)]
        # XLA's buffers are contiguous, so their strides follow from the shapes.
        like = tuple(torch.empty(each.shape, dtype=getattr(torch, each.dtype), device="meta") for each in chosen)
        at = tuple(place[name] for name in reads), tuple(place[name] for name in writes)
        kinds = tuple([torch.uint8 if each.dtype == torch.bool else each.dtype for each in like])  # Triton has no bits
        self.steps.append(step(kernel, *at, kinds, how(like)))

    def built(self) -> KernelProgram:
        """Returns the program."""
        return KernelProgram(tuple(self.buffers.values()), tuple(self.steps))


def _nothing() -> None:
    """Stands for the compilation of a step, which ``attributes`` does."""


@lru_cache(maxsize=256)
def _attributes(
    kernel: KernelInterface,
    kinds: tuple[torch.dtype, ...],
    grid: tuple[int, int, int],
    numbers: tuple[object, ...],
    constants: tuple[tuple[str, object], ...],
) -> dict[str, object]:
    """Returns the attributes of the custom call; compiles the kernel for the current GPU."""
    # A dtype stands for a tensor whose address is aligned.
    compiled = kernel.warmup(*kinds, *numbers, grid=grid, **dict(constants))
    return {"name": compiled.metadata.name, "opaque": zlib.compress(_call(compiled, grid, numbers, len(kinds)))}


def _call(compiled: CompiledKernel, grid: tuple[int, int, int], numbers: tuple[object, ...], tensors: int) -> bytes:
    """Returns jaxlib's description of a launch.

    Raises:
        Unrecordable: for compiled code that needs more than pointers and numbers.
    """
    library, about = _jaxlib(), compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl", "tmem_size"):
        if getattr(about, name, 0):
            raise Unrecordable(f"a Triton kernel with {name}={getattr(about, name)}")
    if about.num_ctas != 1:
        raise Unrecordable(f"a Triton kernel with num_ctas={about.num_ctas}")
    kinds = list(compiled.src.signature.values())
    parameters = [library.create_array_parameter(0, ALIGNMENT)] * tensors
    for kind, number in zip(kinds[tensors:], numbers, strict=False):
        if kind == "constexpr":  # Triton compiled the number 1 in
            continue
        if kind not in _NUMBERS:
            raise Unrecordable(f"a Triton kernel with a number of type {kind}")
        parameters.append(library.create_scalar_parameter(number, kind))
    # Triton's code takes the address of scratch memory behind them. jaxlib passes the last such address itself.
    parameters.append(library.create_scalar_parameter(0, "i64"))
    capability = int(compiled.metadata.target.arch)
    kernel = library.TritonKernel(about.name, about.num_warps, 1, about.shared, compiled.asm["ptx"], "", capability)
    return library.TritonKernelCall(kernel, *grid, parameters).to_proto(about.name, b"")


@lru_cache(maxsize=1)
def _jaxlib() -> ModuleType:
    """Returns the part of jaxlib that launches Triton kernels. It is not public, so every name is looked for."""
    try:
        from jaxlib import gpu_triton
    except Exception as error:  # a part of jaxlib that is not public can fail in any way
        raise Unrecordable(f"jaxlib has no gpu_triton: {type(error).__name__}: {error}") from error
    needed = ("TritonKernel", "TritonKernelCall", "create_array_parameter", "create_scalar_parameter")
    missing = [name for name in needed if not hasattr(gpu_triton, name)]
    targets: Any = getattr(getattr(gpu_triton, "_cuda_triton", None), "registrations", dict)()
    if missing or TARGET not in targets:
        raise Unrecordable(f"jaxlib.gpu_triton has no {', '.join(missing) or TARGET}; a GPU's jaxlib 0.10.2 has it")
    return gpu_triton
