"""Checks the values of a call and what its backend returns, for ``attn_core.checks``.

The form of what a backend returns is checked in every compiled call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from attn_core.call import cache_rows
from attn_core.call.arguments import Arrays, build_spec
from attn_core.call.checks import enabled, result_error, warn_of_results, warn_of_values
from attn_core.call.key_ranges import check_values
from attn_core.call.observe import range_name
from attn_core.call.options import Options
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.plan import Plan, filled_results, lse_dtype
from torch_frontend.dispatch.run_plan import note_plan

Tensor = torch.Tensor
Named = Mapping[str, Tensor | None]


def check(inputs: Inputs, options: Options, info: SeqInfo | None) -> None:
    """Warns of mistakes in the values of a call. Reads every tensor, so it waits for the device."""
    tokens = None if info is None else int(info.cu_seqlens_q[-1])
    arrays = {name: as_numpy(tensor) for name, tensor in zip(Arrays._fields, inputs, strict=False)}
    spec = build_spec(plan.arrays_of(plan.metadata(inputs)), options)
    if inputs.key_ranges is not None:
        check_values(arrays["key_ranges"], spec.q_len)
    warn_of_values(spec, arrays, tokens)


def check_cache(qkv: tuple[Tensor, ...], keywords: Mapping[str, Any]) -> None:
    """Runs ``check`` for a call on rows of a cache, with the tensors and the keywords of its form with key ranges."""
    inputs, options = cache_rows.as_inputs(qkv, keywords)
    check(inputs, options, None)


def as_numpy(tensor: Tensor | None) -> Any:
    """Returns a tensor's values as a numpy array, bfloat16 as float32; None for an absent tensor."""
    if tensor is None:
        return None
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_forward(call_plan: Plan, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Checks the form of a forward's results.

    Raises:
        ResultError: unless they have the shapes, dtypes and device that the spec says.
    """
    spec = call_plan.spec
    expected = {"out": (out, spec.out_shape, q.dtype)}
    if spec.return_lse or spec.needs_backward or spec.partial:  # otherwise nobody reads it
        expected["lse"] = (lse, spec.lse_shape, lse_dtype(q))
    for name, (actual, shape, dtype) in expected.items():
        if not _is_as(actual, shape, dtype, q.device):
            error = result_error(name, actual, shape, str(dtype).removeprefix("torch."), q.device)
            note_plan(error, call_plan, "forward")
            raise error


def check_backward(call_plan: Plan, inputs: Inputs, gradients: Gradients) -> None:
    """Checks the form of the gradients of q, k and v.

    Raises:
        ResultError: unless they have the shapes, dtypes and devices of q, k and v.
    """
    for name, operand, actual in zip(Gradients._fields, inputs[:3], gradients, strict=False):
        if not _is_as(actual, operand.shape, operand.dtype, operand.device):
            dtype = str(operand.dtype).removeprefix("torch.")
            error = result_error(name, actual, tuple(operand.shape), dtype, operand.device)
            note_plan(error, call_plan, "backward")
            raise error


def _is_as(actual: object, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return isinstance(actual, Tensor) and actual.shape == shape and actual.dtype is dtype and actual.device == device


def in_checks(call_plan: Plan) -> Plan:
    """Returns the plan with its functions checked if ``checks`` are on, else the plan itself.

    A checked plan has no shortcut, because torch runs the backward of one; ``forward`` and ``backward`` run the same
    kernels with the same bits. Buffers for results start as NaN, so that a value which the kernel does not write shows.
    """
    if not enabled() or call_plan.spec.empty:
        return call_plan
    run_forward, run_backward, backend, writes = (
        call_plan.forward,
        call_plan.backward,
        call_plan.backend,
        call_plan.writes_into,
    )

    def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
        into = [filled_results(spec, inputs.q, torch.nan, torch.nan)] if writes else []
        out, lse = run_forward(spec, inputs, *into)
        check_forward(call_plan, inputs.q, out, lse)
        results = {"out": out, "lse": lse if spec.return_lse or spec.needs_backward else None}
        _warn(backend, spec, "forward", inputs._asdict(), results)
        return out, lse

    def backward(
        spec: AttentionSpec, inputs: Inputs, *saved: Tensor | None, into: Gradients | None = None
    ) -> Gradients:
        if writes:
            into = into or Gradients(*(torch.empty_like(tensor) for tensor in inputs[:3]))
            # The three that every backward has; backends allocate the others.
            for buffer in into[:3]:
                buffer.fill_(torch.nan)
        gradients = run_backward(spec, inputs, *saved, **({"into": into} if writes else {}))
        check_backward(call_plan, inputs, gradients)
        operands = inputs._asdict() | dict(zip(("out", "lse", "dout", "dlse"), saved, strict=True))
        _warn(backend, spec, "backward", operands, gradients._asdict())
        return gradients  # type: ignore[no-any-return]

    return call_plan._replace(forward=forward, backward=backward, shortcut=None)


def _warn(backend: str, spec: AttentionSpec, direction: str, operands: Named, results: Named) -> None:
    arrays = ({name: as_numpy(tensor) for name, tensor in each.items()} for each in (operands, results))
    warn_of_results(range_name(backend, spec, direction), spec.dropout, *arrays)
