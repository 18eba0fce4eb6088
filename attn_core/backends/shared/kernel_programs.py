"""A call as kernels on buffers, as plain data: what a backend hands out so that XLA can run it without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SCRATCH = "scratch"
RESULTS = {"forward": ("out", "lse"), "backward": ("dq", "dk", "dv")}
"""The names of what a call gives."""


class Unrecordable(RuntimeError):
    """A call cannot be told as kernels on buffers; the text says why."""


class Buffer(NamedTuple):
    """Memory of a program, contiguous.

    Attributes:
        name: of the operand or result that it is, or SCRATCH.
        dtype: as in a spec, "int32" or "bfloat16".
        zeros: whether it holds zeros at first.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    zeros: bool = False


class Step(NamedTuple):
    """One kernel of a program.

    Attributes:
        target: a name made of everything that the compiled code depends on, the same in every process.
        reads: places in ``Program.buffers`` that have been written by now, in the order of the function's arguments.
        writes: what the kernel may write, after those; what is in both is updated.
        compile: gives a ``tvm_ffi.Function`` of the tensors of reads and writes; takes a second or so.
    """

    target: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    compile: Callable[[], Any]


class Program(NamedTuple):
    """What a call does: operands are the buffers that no step writes, results have their names."""

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
