"""Calls a backend's own forward and backward in torch, and judges what a caller gets of them by the reference."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from callers_view import callers_results
from torch.utils._python_dispatch import TorchDispatchMode

from attn_core.backends.shared import rewrites
from attn_core.call.tensors import Gradients
from attn_core.correctness import accuracy

IN_THE_DTYPE = ("q", "k", "v", "bias")


class Results(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor | None
    gradients: Gradients | None = None


def tensors(inputs: Any, dtype: str, device: str = "cpu") -> Any:
    """The arrays as tensors: q, k, v and bias in a dtype, other floats in float32, or in float64 beside float64."""
    kinds = {name: getattr(torch, dtype) for name in IN_THE_DTYPE}
    other = torch.float64 if dtype == "float64" else torch.float32
    made = {}
    for name, array in inputs._asdict().items():
        tensor = None if array is None else torch.from_numpy(np.array(array)).to(device)
        made[name] = tensor.to(kinds.get(name, other)) if array is not None and tensor.is_floating_point() else tensor
    return type(inputs)(**made)


def arrays(results: Any) -> Any:
    """Tensors as numpy arrays, floats in float64."""
    return type(results)(
        *(
            None if each is None else (each.double() if each.is_floating_point() else each).detach().cpu().numpy()
            for each in results
        )
    )


def rewritten(kernel: rewrites.Kernel) -> SimpleNamespace:
    """A kernel with its rewrites, as a backend's functions."""
    return SimpleNamespace(forward=partial(rewrites.forward, kernel), backward=partial(rewrites.backward, kernel))


def ran(backend: Any, case: Any, inputs: Any = None, device: str = "cpu") -> Results:
    """Runs a case of ``oracle_cases`` or a drawn call: forward, and backward if its spec has one.

    The gradient of the log-sum-exp of a row that sees no key is infinite, as that of its square is.
    """
    spec = case.spec
    inputs = tensors(case.inputs, spec.dtype, device) if inputs is None else inputs
    out, lse = backend.forward(spec, inputs)
    if not spec.needs_backward:
        return Results(out, lse)
    dout, dlse = torch.from_numpy(case.dout).to(out), None
    if spec.return_lse:
        dlse = torch.from_numpy(case.dlse).to(lse).masked_fill(lse == -torch.inf, torch.inf)
    return Results(out, lse, backend.backward(spec, inputs, out, lse, dout, dlse))


def judged(case: Any, results: Results) -> accuracy.Accuracy:
    """The verdict on results. A log-sum-exp that is None, or that the call neither returns nor learns with, is free."""
    spec, learned = case.spec, results.gradients is not None
    dlse = case.dlse if learned and spec.return_lse else None
    expected = accuracy.expect(spec, case.inputs, dout=case.dout if learned else None, dlse=dlse)
    gradients = arrays(results.gradients) if learned else None
    lse = None
    if results.lse is not None:
        lse, gradients = callers_results(spec, case.inputs, results.lse.detach().double().cpu(), gradients, dlse)
    out = results.out.detach().double().cpu().numpy()
    return expected.judge(out=out, lse=lse if learned or spec.return_lse else None, gradients=gradients)


def assert_right(backend: Any, case: Any, inputs: Any = None, device: str = "cpu") -> Results:
    """Runs a case; checks values, shapes and dtypes of all results, and that none of them has a graph."""
    spec, inputs = case.spec, tensors(case.inputs, case.spec.dtype, device) if inputs is None else inputs
    results = ran(backend, case, inputs)
    verdict = judged(case, results)
    assert verdict.ok, f"{spec}\n{verdict}"
    out, lse, gradients = results
    assert tuple(out.shape) == spec.out_shape and tuple(lse.shape) == spec.lse_shape
    assert (out.dtype, str(lse.dtype)) == (inputs.q.dtype, f"torch.{spec.lse_dtype}")
    assert not out.requires_grad and not lse.requires_grad
    given = {f"d{name}": tensor for name, tensor in inputs._asdict().items()}
    for name, gradient in ({} if gradients is None else gradients._asdict()).items():
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (given[name].shape, given[name].dtype), name
    return results


def assert_writes_into(backend: Any, case: Any, inputs: Any = None) -> None:
    """A backend returns the buffers that its kernel can write, and leaves one at an address that is no multiple of 16.

    The values in the buffers are those of a call without any.
    """
    spec = case.spec
    inputs = tensors(case.inputs, spec.dtype) if inputs is None else inputs
    dout, kind = torch.from_numpy(case.dout).to(inputs.q), inputs.q.dtype
    buffer, lse_buffer = torch.full(spec.out_shape, torch.nan, dtype=kind), torch.full(spec.lse_shape, torch.nan)
    out, lse = backend.forward(spec, inputs, (buffer, lse_buffer))
    assert out is buffer
    into = Gradients(*(torch.full_like(tensor, torch.nan) for tensor in inputs[:3]))
    written = backend.backward(spec, inputs, out, lse, dout, None, into)
    assert all(one is other for one, other in zip(written[:3], into[:3]))
    free, free_lse = backend.forward(spec, inputs)
    gradients = backend.backward(spec, inputs, free, free_lse, dout, None)
    pairs = ((out, free), (lse, free_lse), *zip(written[:3], gradients[:3]))
    assert all(torch.equal(one, other) for one, other in pairs)
    unaligned = torch.empty(buffer.numel() + 1, dtype=kind)[1:].view(buffer.shape)
    assert backend.forward(spec, inputs, (unaligned, None))[0] is not unaligned


class LargestOutput(TorchDispatchMode):
    """The size of the largest output of any operation.

    Attributes:
        elements: of a tensor.
        memory: bytes of its storage.
        pairs: of queries and keys that flash kernels visit in the forward.
    """

    elements = memory = pairs = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
                self.memory = max(self.memory, output.untyped_storage().nbytes())
        if "flash_attention" in str(function) and "backward" not in str(function):
            self.pairs += args[0].shape[2] * args[1].shape[2]
        return result
