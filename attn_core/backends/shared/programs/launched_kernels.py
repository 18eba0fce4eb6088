"""The kernels of a program as an operator of torch, so that a text of operators can launch them beside others.

``operator_call.cc`` defines the operator, ``attn_core_kernels::launch``, and knows a kernel by the name of its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import Buffer, KernelProgram, Unrecordable
from attn_core.backends.shared.programs.operator_recorder import Functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

Tensors = dict[str, Any]
"""Tensors by the names of a program's buffers."""


def functions_of(program_of: Callable[..., KernelProgram]) -> Functions:
    """Returns the forward and backward of a backend as launches of its programs' kernels, to be recorded.

    Args:
        program_of: the backend's ``program``.
    """

    def forward(spec: AttentionSpec, inputs: Inputs, into: Any = None) -> tuple[Any, Any]:
        program = _program(program_of, replace(spec, return_lse=True), "forward")
        results = _launch(program, _given(inputs), dict(zip(("out", "lse"), into or (), strict=False)))
        return _cut(results["out"], spec.value_dim), results["lse"]

    def backward(
        spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any = None, into: Any = None
    ) -> Gradients:
        program = _program(program_of, spec, "backward", dlse is not None)
        saved = {"out": out, "lse": lse, "dout": dout}
        if dlse is not None:  # a row that sees no key has weight 0, and kernels do not check for it
            saved["dlse"] = dlse.masked_fill(lse == -float("inf"), 0.0)
        results = _launch(program, _given(inputs) | saved, dict(zip(("dq", "dk", "dv"), into or (), strict=False)))
        widths = {"dq": spec.head_dim, "dk": spec.head_dim, "dv": spec.value_dim}
        return Gradients(**{name: _cut(results[name], width) for name, width in widths.items()})

    return Functions(forward, backward, True)


def _program(program_of: Callable[..., KernelProgram], *about: Any) -> KernelProgram:
    with operator_recorder.outside():  # a program is itself recorded
        return program_of(*about)


def _given(inputs: Inputs) -> Tensors:
    return {name: tensor for name, tensor in zip(Inputs._fields, inputs, strict=True) if tensor is not None}


def _launch(program: KernelProgram, given: Tensors, into: Tensors) -> Tensors:
    """Runs a program's steps; returns its named buffers.

    Args:
        given: the operands. into: buffers for results; a result that does not fit gets another one.

    Raises:
        Unrecordable: if a kernel is not launched by TVM's interface, or needs an operand that is not given.
    """
    import torch

    if not hasattr(torch.ops.attn_core_kernels, "launch"):
        raise Unrecordable("torch's operator that launches kernels is in a library that is not loaded")
    like = given["q"]
    tensors: dict[int, Any] = {}
    for at, buffer in enumerate(program.buffers):
        if buffer.name in given:
            tensors[at] = _operand(given[buffer.name], buffer)
        elif buffer.zeros:
            tensors[at] = _result(buffer, into, like).zero_()
    for step in program.steps:
        if step.attributes is not None:
            raise Unrecordable(f"{step.target}: a kernel that only XLA can launch")
        for at in step.writes:
            if at not in tensors:
                tensors[at] = _result(program.buffers[at], into, like)
        missing = [program.buffers[at].name for at in step.reads if at not in tensors]
        if missing:
            raise Unrecordable(f"{step.target}: a kernel that reads {', '.join(missing)}")
        reads, writes = ([tensors[at] for at in of_step] for of_step in (step.reads, step.writes))
        torch.ops.attn_core_kernels.launch(step.target, reads, writes)
    return {program.buffers[at].name: tensor for at, tensor in tensors.items()}


def _operand(tensor: Any, buffer: Buffer) -> Any:
    """Returns an operand as contiguous memory of the buffer's width."""
    import torch

    lacking = buffer.shape[-1] - tensor.shape[-1] if tensor.dim() else 0
    tensor = torch.nn.functional.pad(tensor, (0, lacking)) if lacking else tensor.contiguous()
    if tuple(tensor.shape) != buffer.shape:
        raise Unrecordable(f"{buffer.name}: a kernel for {list(buffer.shape)} on {list(tensor.shape)}")
    return tensor


def _result(buffer: Buffer, into: Tensors, like: Any) -> Any:
    """Returns memory for what a kernel writes: the buffer that was given for a result, if it fits, or new memory."""
    import torch

    dtype, given = getattr(torch, buffer.dtype), into.get(buffer.name)
    if given is not None and tuple(given.shape) == buffer.shape and given.dtype == dtype and given.is_contiguous():
        return given
    return torch.empty(buffer.shape, dtype=dtype, device=like.device)


def _cut(tensor: Any, width: int) -> Any:
    """Returns a result without the channels that only the kernel has."""
    return tensor if tensor.shape[-1] == width else tensor[..., :width]
