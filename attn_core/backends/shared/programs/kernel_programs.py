"""A call as a list of kernels on buffers, in plain data. XLA can run it without Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec

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


def operands_in_float32(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    """Returns the operands of a program that are not the call's own arrays, by name: sinks and slopes in float32."""
    return {name: arrays[name].astype("float32") for name in ("sinks", "alibi_slopes") if name in arrays}
