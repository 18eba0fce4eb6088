"""Forward mode: the op ``attn::jvp``, which computes the tangents of a call's results.

A call's results come from ``attn::forward``, by any backend. The tangents come from a backend that claims forward mode,
which ``attn_core.selection.forward_mode`` chooses. The op has the arguments of ``attn::forward`` behind the tangents.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_core.backends.shared.caches import from_records
from attn_core.call.functions import AUX
from attn_core.call.options import Options
from attn_core.call.tensors import Inputs, Tangents
from attn_core.errors import SpecError
from attn_core.expressions.properties import aux_numbers
from attn_core.selection import forward_mode
from torch_frontend.dispatch import ops, plan
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.op_arguments import Op, OpOptions, requested_now, tensors_of, to_call
from torch_frontend.dispatch.run_plan import as_backends_take, check_key_ranges, with_four_axes
from torch_frontend.dispatch.sdpa_flags import Switches

Tensor = torch.Tensor
JVP = Op("jvp", Tangents._fields, ("dout", "dlse"))


@from_records(maxsize=4096)
def plan_of(
    metadata: Inputs,
    options: Options,
    requested: tuple[str, ...] | None,
    switches: Switches | None,
    arrays: tuple[int, ...],
) -> plan.PlanBeside:
    """Checks a call and chooses the backend of its tangents; the arguments are those of ``plan.plan``.

    Args:
        arrays: the numbers of the aux arrays that have tangents.

    Raises:
        SpecError: if no backend, or not the requested one, can compute them; the message has every reason.
    """
    spec, target, names = plan.request(metadata, options, False, False, requested, switches)
    backend = forward_mode.noted(forward_mode.choose(spec, target, names, arrays))
    return plan.plan_beside("jvp", backend, spec, target, metadata)


def tangents_of(how: OpOptions, moved: Inputs) -> tuple[Tangents, OpOptions]:
    """Returns the tangents of a call, and its options with the numbers of the arrays that have tangents.

    Args:
        moved: the tangents in the places of the tensors.

    Raises:
        SpecError: for a tangent of an argument that has no derivative.
    """
    if moved.alibi_slopes is not None:
        raise SpecError("alibi_slopes: expected no tangent, its derivative is not defined here; pass it detached")
    score_mod = how.options.score_mod
    read = () if score_mod is None else aux_numbers(score_mod)  # a mask function has no derivative
    numbers = tuple(number for number in read if getattr(moved, AUX[number]) is not None)
    tangents = Tangents(moved.q, moved.k, moved.v, moved.bias, moved.sinks)
    options = how.options._replace(aux_gradients=numbers)
    return tangents, how._replace(options=options, needs_backward=False, bias_gradient=False)


def _jvp_op(*arguments: object) -> tuple[Tensor, Tensor]:
    """Computes the tangents of out and lse: the body of ``attn::jvp``. Without a tangent they are 0."""
    inputs, how = ops.complete(JVP.call_of(arguments))
    inputs, tangents = ops.with_ranges_on_device(inputs), Tangents(*arguments[: len(JVP.own)])
    requested, switches = requested_now(how.backend)
    # An op has no option of its own for the arrays with tangents; ``tangents_of`` put their numbers here.
    options, arrays = how.options._replace(aux_gradients=()), how.options.aux_gradients
    call_plan = plan_of(plan.metadata(inputs), options, requested, switches, arrays)
    check_key_ranges(call_plan.spec, inputs.key_ranges)
    if call_plan.function is None or all(each is None for each in tangents):
        dout, dlse = ops.results_like(inputs)
        return dout.zero_(), dlse.zero_()
    # Tangents in the forms that ``as_backends_take`` gives to their tensors.
    if call_plan.one_row:
        dq, dk, dv = (None if each is None else each[0] for each in (tangents.dq, tangents.dk, tangents.dv))
        tangents = tangents._replace(dq=dq, dk=dk, dv=dv)
    if tangents.dbias is not None:
        tangents = tangents._replace(dbias=with_four_axes(tangents.dbias))
    operands = as_backends_take(inputs, call_plan.one_row)
    with switched_off(inputs.q.device):
        _, _, dout, dlse = call_plan.function(call_plan.spec, operands, tangents)
    # Contiguous, because compilers plan memory with the strides that _jvp_fake promises.
    return (dout[None] if call_plan.one_row else dout).contiguous(), dlse.contiguous()


def _jvp_fake(*arguments: object) -> tuple[Tensor, Tensor]:
    return ops.results_like(tensors_of(JVP.call_of(arguments)))


def run(inputs: Inputs, how: OpOptions, moved: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """Returns the tangents of out and lse.

    Args:
        moved: the tangents of the arguments of ``attn::forward``, None for those that have none.
    """
    tangents, how = tangents_of(how, tensors_of(moved))
    return ops.undifferentiated(JVP)(*tangents, *to_call(inputs, how))  # type: ignore[no-any-return]


ops.register(JVP, _jvp_op, _jvp_fake)
