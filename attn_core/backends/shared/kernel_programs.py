"""A call as a list of kernels on buffers, in plain data. XLA can run it without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SCRATCH = "scratch"
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
"""The names of a call's results."""


class Unrecordable(RuntimeError):
    """A call cannot be expressed as kernels on buffers. The message says why."""


class Buffer(NamedTuple):
    """Contiguous memory of a program.

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
    """

    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    compile: Callable[[], Any]


class KernelProgram(NamedTuple):
    """The buffers and kernels of a call. Buffers that no step writes are operands; results carry their names."""

    buffers: tuple[Buffer, ...]
    steps: tuple[KernelStep, ...]
