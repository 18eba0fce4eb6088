"""Forward over reverse: the tangents of a call's gradients, as torch.func.jvp of torch.func.grad asks for them.

The gradients come from ``attn::backward``, by the backend of the forward. Their tangents come from the plain operations
of ``math``, if ``attn_core.selection.forward_mode`` finds that it can run the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.backends.shared.plain.block_operands import SavedTensors
from attn_core.backends.shared.plain.second_tangents import gradient_tangents
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, Tangents
from attn_core.selection import forward_mode
from torch_frontend.dispatch import plan
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.backend_names import requested_now
from torch_frontend.dispatch.forward_mode import tangents_of
from torch_frontend.dispatch.op_arguments import SCHEMA, from_call, joined, tensors_of, to_call
from torch_frontend.dispatch.ops import complete
from torch_frontend.dispatch.run_plan import check_host_values, four_dimensional
from torch_frontend.dispatch.wrappers import on_device

Tensor = torch.Tensor
SAVED = 4
"""out, lse, dout and dlse: the first arguments, and their tangents the next."""
FIRST = 2 * SAVED + len(Tangents._fields)
"""How many arguments come before those of ``attn::forward``."""


class SecondPlan(NamedTuple):
    """A checked call with the function that computes the tangents of its gradients; None for an empty call."""

    spec: AttentionSpec
    backend: str
    gradient_tangents: Any
    one_row: bool


@lru_cache(maxsize=1024)
def plan_of(
    metadata: tuple[plan.Metadata | None, ...],
    options: Options,
    bias_gradient: bool,
    requested: Any,
    switches: Any,
    arrays: tuple[int, ...],
) -> SecondPlan:
    """Checks a call and chooses the backend; the arguments are those of ``plan.plan``.

    Args:
        arrays: the numbers of the aux arrays that have gradients or tangents.

    Raises:
        SpecError: if no backend, or not the requested one, can compute them; the message has every reason.
    """
    spec, target, names = plan.request(metadata, options, True, bias_gradient, requested, switches)
    one_row = spec.packed and metadata[0] is not None and len(metadata[0][0]) == 4
    backend = forward_mode.noted(forward_mode.choose(spec, target, names, arrays, over_reverse=True))
    if spec.empty:
        return SecondPlan(spec, backend, None, one_row)
    assert metadata[0] is not None
    return SecondPlan(spec, backend, on_device(gradient_tangents, metadata[0][2]), one_row)


def _backward_jvp_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Returns the tangents of dq, dk, dv, dbias and dsinks; an empty tensor for an absent one."""
    inputs, plain = complete(arguments[FIRST:])
    inputs = inputs if inputs.key_ranges is None else inputs._replace(key_ranges=inputs.key_ranges.to(inputs.q.device))
    requested, switches = requested_now(plain.backend)
    arrays, plain = plain.array_numbers, plain._replace(aux_gradients=None)
    call_plan = plan_of(plan.metadata(inputs), plain.as_options(), plain.bias_gradient, requested, switches, arrays)
    check_host_values(call_plan.spec, inputs)
    saved, moved = [*arguments[:SAVED]], [*arguments[SAVED : 2 * SAVED]]
    tangents = Tangents(*arguments[2 * SAVED : FIRST])
    learned = (*inputs[:3], inputs.bias if plain.bias_gradient else None, inputs.sinks)
    if call_plan.gradient_tangents is None:
        return tuple([inputs.q.new_empty(0) if each is None else torch.zeros_like(each) for each in learned])
    bias = inputs.bias
    if call_plan.one_row:
        inputs = inputs._replace(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0])
        dq, dk, dv = (None if each is None else each[0] for each in tangents[:3])
        tangents = tangents._replace(dq=dq, dk=dk, dv=dv)
        saved, moved = (
            [each[0] if number in (0, 2) and each is not None else each for number, each in enumerate(both)]
            for both in (saved, moved)
        )
    if tangents.dbias is not None:
        tangents = tangents._replace(dbias=four_dimensional(Inputs(*inputs[:3], bias=tangents.dbias)).bias)
    with switched_off(inputs.q.device):
        results: Gradients = call_plan.gradient_tangents(
            call_plan.spec, four_dimensional(inputs), SavedTensors(*saved), tangents, SavedTensors(*moved)
        )
    rows = [each[None] if call_plan.one_row else each for each in results[:3]]
    dbias = None if results.dbias is None or bias is None else results.dbias.reshape(bias.shape)
    every = (*rows, dbias, results.dsinks)
    return tuple([inputs.q.new_empty(0) if each is None else each.contiguous() for each in every])


def _backward_jvp_fake(*arguments: Any) -> tuple[Tensor, ...]:
    inputs, plain = from_call(arguments[FIRST:])
    learned = (*inputs[:3], inputs.bias if plain.bias_gradient else None, inputs.sinks)
    return tuple([inputs.q.new_empty(0) if each is None else each.new_empty(each.shape) for each in learned])


class BackwardTangents(torch.autograd.Function):
    """``attn::backward_jvp``. Under vmap it runs once for each element; its own derivative raises."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.attn.backward_jvp(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        rows = [
            BackwardTangents.apply(
                *(
                    each if axis is None else each.select(axis, at)
                    for each, axis in zip(arguments, in_dims, strict=True)
                )
            )
            for at in range(info.batch_size)
        ]
        results = tuple([torch.stack(each) for each in zip(*rows, strict=True)])
        return results, (0,) * len(results)


def run(saved: Sequence[Tensor | None], call: Sequence[Any], moved: Sequence[Any]) -> tuple[Tensor, ...]:
    """Returns the tangents of the first results of ``attn::backward``.

    Args:
        saved: dout, dlse, out and lse.
        call: the arguments of ``attn::forward``.
        moved: the tangents of the arguments of ``attn::backward``, None for those that have none.
    """
    inputs, plain = from_call(call)
    tangents, with_arrays = tangents_of(plain, tensors_of(moved[5:]))
    numbers = sorted({*plain.array_numbers, *with_arrays.array_numbers})
    plain = plain._replace(aux_gradients=joined(tuple(numbers)))
    dout, dlse, out, lse = saved
    assert out is not None
    of_dout, of_dlse, of_out, of_lse, *_ = moved
    first = out, lse, torch.zeros_like(out) if dout is None else dout, dlse if plain.return_lse else None
    second = of_out, of_lse, of_dout, of_dlse if plain.return_lse else None
    return BackwardTangents.apply(*first, *second, *tangents, *to_call(inputs, plain))  # type: ignore[no-any-return]


_library = torch.library.Library("attn", "FRAGMENT")
_SAVED = "Tensor out, Tensor lse, Tensor dout, Tensor? dlse"
_MOVED = ", ".join(f"Tensor? of_{name}" for name in ("out", "lse", "dout", "dlse"))
_TANGENTS = ", ".join(f"Tensor? tangent_of_{name.removeprefix('d')}" for name in Tangents._fields)
_library.define(
    f"backward_jvp({_SAVED}, {_MOVED}, {_TANGENTS}, {SCHEMA}) -> ({', '.join(['Tensor'] * 5)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("backward_jvp", _backward_jvp_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn::backward_jvp", _backward_jvp_fake, lib=_library)
torch.library.register_autograd("attn::backward_jvp", refuse_second_derivative, lib=_library)
