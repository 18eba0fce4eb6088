"""Registers the ops that compilers trace: ``attn::forward`` and ``attn::backward``.

An eager call runs its plan's backend directly. Under torch.compile and torch.export the same steps run inside these two
opaque ops. They take the call as plain arguments, because shapes may be symbolic outside the op and are ints inside.
Eager calls use the ops under transforms alone (transforms.py), so the ops' autograd adds nothing to an eager call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from attn_core.backends import names
from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.backends.shared.caches import keeping_nothing
from attn_core.call.functions import AUX, DAUX
from attn_core.call.options import Options
from attn_core.call.tensors import Gradients, Inputs
from torch_frontend.dispatch import in_parts, offsets, vmap
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.op_arguments import (
    COUNT,
    TENSORS,
    Op,
    OpOptions,
    from_call,
    requested_now,
    tensors_of,
    to_call,
)
from torch_frontend.dispatch.plan import Plan, lse_dtype, metadata, plan
from torch_frontend.dispatch.run_plan import check_key_ranges, gradients_in_order, in_ranges, run_backward, run_forward
from torch_frontend.dispatch.value_checks import check_backward, check_forward

Tensor = torch.Tensor
Rule = Callable[..., object]
FORWARD = Op("forward", (), ("out", "lse", "chosen"))
_SAVED = ("dout", "dlse", "out", "lse", "chosen")
BACKWARD = Op("backward", _SAVED, Gradients._fields[: -len(DAUX)], sums_over_batch=True)
BACKWARD_WITH_AUX = Op("backward_with_aux", _SAVED, Gradients._fields, sums_over_batch=True)
"""Most calls have no gradient of an aux array, and spare the empty results."""


def complete(call: Sequence[object]) -> tuple[Inputs, OpOptions]:
    """Returns the arguments of ``attn::forward`` with offsets that give every token a document."""
    inputs, how = from_call(call)
    if inputs.mask is not None:
        # A mask may keep its additive form (aten_masks), but not here: while a CUDA graph warms up, new memory belongs
        # to the graph. The detached mask is a new object, without what is attached to the original.
        inputs = inputs._replace(mask=inputs.mask.detach())
    if inputs.cu_seqlens_q is None:
        return inputs, how
    inputs, longest = offsets.complete(inputs, (how.options.max_len_q, how.options.max_len_k))
    return inputs, how._replace(options=how.options._replace(max_len_q=longest[0], max_len_k=longest[1]))


def with_ranges_on_device(inputs: Inputs) -> Inputs:
    """Returns the inputs with key ranges on q's device."""
    if inputs.key_ranges is None:
        return inputs
    return inputs._replace(key_ranges=inputs.key_ranges.to(inputs.q.device))


def _op_plan(inputs: Inputs, how: OpOptions, chosen: Tensor | None = None) -> tuple[Plan, Inputs]:
    """Plans a call for the body of an op; returns the inputs that the plan takes, too.

    Args:
        chosen: in the backward, the forward's third result, see ``_chosen``; None in the forward, which chooses.
    """
    name, as_parts = (None, False) if chosen is None else _chosen_backend(int(chosen))
    requested, switches = requested_now(how.backend)
    rest = how.options, how.needs_backward, how.bias_gradient
    # The backward runs on its forward's backend, even if use_backend or sdpa_kernel names another one by then.
    if name is not None and not as_parts:
        inputs = with_ranges_on_device(inputs)
        return in_ranges(plan(metadata(inputs), *rest, (name,), None)), inputs
    arguments = in_parts.metadata(inputs), *rest, requested, switches
    call_plan, inputs = in_parts.resolve(arguments, inputs, name)
    return in_ranges(call_plan), inputs


def _chosen(call_plan: Plan) -> Tensor:
    """Returns what ran a forward as one number on the CPU, because the results of an op are tensors.

    It is the place of the plan's backend in ``names()``, plus their number if the plan runs in parts.
    """
    name = call_plan.instead or call_plan.backend
    return torch.tensor(names().index(name) + len(names()) * call_plan.in_parts, device="cpu")


def _chosen_backend(number: int) -> tuple[str, bool]:
    """Returns the backend's name, and whether it ran in parts; the inverse of ``_chosen``."""
    as_parts, place = divmod(number, len(names()))
    return names()[place], bool(as_parts)


def _forward_op(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    inputs, how = complete(arguments)
    call_plan, inputs = _op_plan(inputs, how)
    check_key_ranges(call_plan.spec, inputs.key_ranges)
    with switched_off(inputs.q.device), keeping_nothing():
        out, lse = run_forward(call_plan, inputs)
    # Compiled code reads the results' memory as ``_forward_fake`` describes it, and would read out of bounds.
    check_forward(call_plan, inputs.q, out[0] if call_plan.one_row else out, lse)
    # Contiguous, because compilers plan memory with the strides that _forward_fake promises. The backend travels as an
    # index on the CPU, where the backward reads it without waiting for the device.
    return out.contiguous(), lse.contiguous(), _chosen(call_plan)


def results_like(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns uninitialised tensors for out and lse, or for their tangents."""
    q, heads, tokens = inputs.q, inputs.q.shape[-2], inputs.q.shape[-3]
    out = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]))
    rows = (heads, tokens) if inputs.cu_seqlens_q is not None else (q.shape[0], heads, tokens)
    return out, q.new_empty(rows, dtype=lse_dtype(q))


def _forward_fake(*arguments: object) -> tuple[Tensor, Tensor, Tensor]:
    return *results_like(tensors_of(arguments)), torch.empty((), dtype=torch.int64, device="cpu")


def _backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    # The saved offsets are the caller's, not completed ones, so the backward completes them as the forward did.
    dout, dlse, out, lse, chosen, *call = arguments
    inputs, how = complete(call)
    with switched_off(inputs.q.device), keeping_nothing():
        call_plan, inputs = _op_plan(inputs, how, chosen)
        results = run_backward(call_plan, inputs, out, lse, dout, dlse)
    check_backward(call_plan, inputs, results)
    absent = inputs.q.new_empty(0)  # an op must return a tensor for each result, and no two may share memory
    expected = results[: len(backward_of(how).results)]
    return tuple(absent.clone() if gradient is None else gradient.contiguous() for gradient in expected)


def _backward_fake(*arguments: object) -> tuple[Tensor, ...]:
    inputs, how = from_call(BACKWARD.call_of(arguments))
    # The order of Gradients: dq, dk, dv, dbias, dsinks, daux0 to daux3.
    arrays = [getattr(inputs, name) if number in how.options.aux_gradients else None for number, name in enumerate(AUX)]
    differentiated = (*inputs[:3], inputs.bias if how.bias_gradient else None, inputs.sinks, *arrays)
    expected = differentiated[: len(backward_of(how).results)]
    return tuple(inputs.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in expected)


def backward_of(how: OpOptions) -> Op:
    """Returns the op that computes a call's gradients."""
    return BACKWARD_WITH_AUX if how.options.aux_gradients else BACKWARD


def save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    """Saves what the backward of ``attn::forward`` needs: all its tensors, results and options."""
    tensors, ctx.how = from_call(inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object, *, applied: Callable[[Op], Any] = lambda op: op.run
) -> tuple[Any, ...]:
    """Computes the gradients of ``attn::forward``'s arguments.

    Args:
        applied: returns what runs ``attn::backward``.
    """
    *tensors, out, lse, chosen = ctx.saved_tensors
    how: OpOptions = ctx.how
    inputs = Inputs(*tensors)
    results = applied(backward_of(how))(
        dout, dlse if how.options.return_lse else None, out, lse, chosen, *to_call(inputs, how)
    )
    gradients = _without_absent(results, inputs, how)
    return *gradients_in_order(gradients, TENSORS), *(None,) * COUNT


def _without_absent(results: Sequence[Tensor], inputs: Inputs, how: OpOptions) -> Gradients:
    """Returns the results of ``attn::backward`` as Gradients, with None for the empty tensors of absent gradients."""
    dbias = results[3] if how.bias_gradient else None
    dsinks = None if inputs.sinks is None else results[4]
    daux = {DAUX[number]: results[5 + number] for number in how.options.aux_gradients}
    return Gradients(results[0], results[1], results[2], dbias, dsinks, **daux)


def mapped_gradients(
    call_plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Computes a plan's gradients with ``attn::backward``, which has a rule for the active vmap."""
    spec = call_plan.spec
    options = Options(*(getattr(spec, name) for name in Options._fields))
    how = OpOptions(options, spec.needs_backward, spec.bias_gradient, call_plan.backend)
    results = backward_of(how).run(dout, dlse, out, lse, _chosen(call_plan), *to_call(inputs, how))
    return _without_absent(results, inputs, how)


@lru_cache(maxsize=8)
def undifferentiated(op: Op) -> Callable[..., Any]:
    """Returns an op with a rule for vmap; same arguments and results. Its own derivatives raise."""

    class Undifferentiated(torch.autograd.Function):
        @staticmethod
        def forward(*arguments: object) -> Any:
            return op.run(*arguments)

        @staticmethod
        def setup_context(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: object, *gradients: Tensor | None) -> None:
            refuse_second_derivative()

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmap.MappedResults:
            return vmap.rule(op, Undifferentiated.apply, info, in_dims, *arguments)

        @staticmethod
        def jvp(ctx: object, *_: object) -> None:
            refuse_second_derivative()

    return Undifferentiated.apply  # type: ignore[no-any-return]


# torch's compiler caches identify ops by name: after a release, a changed schema needs a new op name.
_library = torch.library.Library("attn", "DEF")


def register(
    op: Op, body: Rule, fake: Rule, differentiate: Rule = refuse_second_derivative, save: Rule | None = None
) -> None:
    """Registers an op with its rules for compilers, autograd and vmap."""
    name = f"attn::{op.name}"
    _library.define(op.schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(op.name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_autograd(name, differentiate, setup_context=save, lib=_library)
    torch.library.register_vmap(name, partial(vmap.rule, op, op.run), lib=_library)


register(FORWARD, _forward_op, _forward_fake, differentiate, save)
for _op in (BACKWARD, BACKWARD_WITH_AUX):
    register(_op, _backward_op, _backward_fake)


def traced(inputs: Inputs, how: OpOptions) -> tuple[Tensor, Tensor]:
    """Runs the call as the op ``attn::forward`` and returns (out, lse)."""
    out, lse, _ = torch.ops.attn.forward(*to_call(inputs, how))
    return out, lse
