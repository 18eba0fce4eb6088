"""Registers the ops that compilers trace: ``attn::forward`` and ``attn::backward``.

An eager call runs its plan's backend directly. Under torch.compile and torch.export the same steps run inside these two
opaque ops. They take the call as plain arguments, because shapes may be symbolic outside the op and are ints inside.
Eager calls use the ops under transforms alone (transforms.py), so the ops' autograd adds nothing to an eager call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from attn_core.backends import names
from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.call.functions import AUX, DAUX
from attn_core.call.options import Options
from attn_core.call.tensors import Gradients, Inputs
from torch_frontend.dispatch import in_parts, offsets, vmap
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.backend_names import requested_now
from torch_frontend.dispatch.checked_results import check_backward, check_forward
from torch_frontend.dispatch.op_arguments import COUNT, SCHEMA, TENSORS, OpOptions, from_call, tensors_of, to_call
from torch_frontend.dispatch.plan import Plan, metadata, plan
from torch_frontend.dispatch.ranges import in_ranges
from torch_frontend.dispatch.run_plan import check_key_ranges, gradients_in_order, run_backward, run_forward

Tensor = torch.Tensor


def complete(call: Sequence[Any]) -> tuple[Inputs, OpOptions]:
    """Returns the arguments of ``attn::forward`` with offsets that give every token a document."""
    inputs, how = from_call(call)
    if inputs.mask is not None:
        # A mask may keep its additive form (kept_masks), but not here: while a CUDA graph warms up, new memory belongs
        # to the graph. The detached mask is a new object, without what is attached to the original.
        inputs = inputs._replace(mask=inputs.mask.detach())
    if inputs.cu_seqlens_q is None:
        return inputs, how
    inputs, longest = offsets.complete(inputs, (how.options.max_len_q, how.options.max_len_k))
    return inputs, how._replace(options=how.options._replace(max_len_q=longest[0], max_len_k=longest[1]))


def _op_plan(inputs: Inputs, how: OpOptions, chosen: Tensor | None = None) -> tuple[Plan, Inputs]:
    """Plans a call, with ``chosen`` on the backend that the forward chose; returns the inputs that the plan takes."""
    requested, switches = requested_now(how.backend)
    rest = how.options, how.needs_backward, how.bias_gradient
    number = -1 if chosen is None else int(chosen)
    name = names()[number % len(names())]
    # The backward runs on its forward's backend, even if use_backend or sdpa_kernel names another one by then.
    if 0 <= number < len(names()):
        if inputs.key_ranges is not None:
            inputs = inputs._replace(key_ranges=inputs.key_ranges.to(inputs.q.device))
        return in_ranges(plan(metadata(inputs), *rest, (name,), None)), inputs
    arguments = in_parts.metadata(inputs), *rest, requested, switches
    call_plan, inputs = in_parts.resolve(arguments, inputs, None if chosen is None else name)
    return in_ranges(call_plan), inputs


def _chosen(call_plan: Plan) -> Tensor:
    """Returns the number of a plan's backend, as ``_op_plan`` reads it; numbers from ``len(names())`` on mean parts."""
    return torch.tensor(names().index(call_plan.backend) + len(names()) * call_plan.in_parts, device="cpu")


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, how = complete(arguments)
    call_plan, inputs = _op_plan(inputs, how)
    check_key_ranges(call_plan.spec, inputs.key_ranges)
    with switched_off(inputs.q.device):
        out, lse = run_forward(call_plan, inputs)
    # Compiled code reads the results' memory as ``_forward_fake`` describes it, and would read out of bounds.
    check_forward(call_plan, inputs.q, out[0] if call_plan.one_row else out, lse)
    # Contiguous, because compilers plan memory with the strides that _forward_fake promises. The backend travels as an
    # index on the CPU, where the backward reads it without waiting for the device.
    return out.contiguous(), lse.contiguous(), _chosen(call_plan)


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = tensors_of(arguments)
    q, heads, tokens = inputs.q, inputs.q.shape[-2], inputs.q.shape[-3]
    out = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]))
    rows = (heads, tokens) if inputs.cu_seqlens_q is not None else (q.shape[0], heads, tokens)
    # Every backend returns the log-sum-exp in float32, except for float64 inputs.
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse, torch.empty((), dtype=torch.int64, device="cpu")


def _backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    # The saved offsets are the caller's, not completed ones, so the backward completes them as the forward did.
    dout, dlse, out, lse, chosen, *call = arguments
    inputs, how = complete(call)
    with switched_off(inputs.q.device):
        call_plan, inputs = _op_plan(inputs, how, chosen)
        results = run_backward(call_plan, inputs, out, lse, dout, dlse)
    check_backward(call_plan, inputs, results)
    absent = inputs.q.new_empty(0)  # an op must return a tensor for each result, and no two may share memory
    expected = results[: _results_of(how)]
    return tuple(absent.clone() if gradient is None else gradient.contiguous() for gradient in expected)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = arguments[5:]
    inputs, how = from_call(call)
    # The order of Gradients: dq, dk, dv, dbias, dsinks, daux0 to daux3.
    arrays = [getattr(inputs, name) if number in how.options.aux_gradients else None for number, name in enumerate(AUX)]
    differentiated = (*inputs[:3], inputs.bias if how.bias_gradient else None, inputs.sinks, *arrays)
    expected = differentiated[: _results_of(how)]
    return tuple(inputs.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in expected)


def _results_of(how: OpOptions) -> int:
    """Returns the number of results of ``backward_op``."""
    return _BACKWARDS["backward_with_aux" if how.options.aux_gradients else "backward"]


def backward_op(how: OpOptions) -> Any:
    """Returns the op that computes a call's gradients."""
    return torch.ops.attn.backward_with_aux if how.options.aux_gradients else torch.ops.attn.backward


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Saves what the backward of ``attn::forward`` needs: all its tensors, results and options."""
    tensors, ctx.how = from_call(inputs)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any, *, backward: Any = None
) -> tuple[Any, ...]:
    """Computes the gradients of ``attn::forward``'s arguments with ``backward``, by default ``attn::backward``."""
    *tensors, out, lse, chosen = ctx.saved_tensors
    how: OpOptions = ctx.how
    backward = backward or backward_op(how)
    inputs = Inputs(*tensors)
    results = backward(dout, dlse if how.options.return_lse else None, out, lse, chosen, *to_call(inputs, how))
    gradients = _without_absent(results, inputs, how)
    return *gradients_in_order(gradients, TENSORS), *(None,) * COUNT


def _without_absent(results: Sequence[Tensor], inputs: Inputs, how: OpOptions) -> Gradients:
    """Returns the results of ``attn::backward`` as Gradients, with None for the empty tensors of absent gradients."""
    dbias = results[3] if how.bias_gradient else None
    dsinks = None if inputs.sinks is None else results[4]
    daux = {DAUX[number]: results[5 + number] for number in how.options.aux_gradients}
    return Gradients(results[0], results[1], results[2], dbias, dsinks, **daux)


def mapped_forward(run: Any, info: Any, in_dims: tuple[Any, ...], *call: Any) -> vmap.MappedResults:
    """Applies the vmap rule to ``run``: ``attn::forward``, or a function with its signature."""
    inputs, how = from_call(call)
    return vmap.forward(
        lambda *tensors: run(*to_call(Inputs(*tensors), how)),
        info.batch_size,
        inputs,
        tensors_of(in_dims),
        how,
    )


def mapped_backward(run: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmap.MappedResults:
    """Applies the vmap rule to ``run``: ``attn::backward``, or a function with its signature."""
    inputs, how = from_call(arguments[5:])
    return vmap.backward(
        lambda *tensors: run(*tensors[:5], *to_call(Inputs(*tensors[5:]), how)),
        info.batch_size,
        arguments[:5],
        in_dims[:5],
        inputs,
        tensors_of(in_dims[5:]),
        how,
        summed=how.bias_gradient or inputs.sinks is not None or bool(how.options.aux_gradients),
    )


def mapped_gradients(
    call_plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Computes a plan's gradients with ``attn::backward``, which has a rule for the active vmap."""
    spec = call_plan.spec
    options = Options(*(getattr(spec, name) for name in Options._fields))
    how = OpOptions(options, spec.needs_backward, spec.bias_gradient, call_plan.backend)
    results = backward_op(how)(dout, dlse, out, lse, _chosen(call_plan), *to_call(inputs, how))
    return _without_absent(results, inputs, how)


# torch's compiler caches identify ops by name: after a release, a changed schema needs a new op name.
_library = torch.library.Library("attn", "DEF")
_library.define(f"forward({SCHEMA}) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_SAVED = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor chosen"
_BACKWARDS = {"backward": 5, "backward_with_aux": 9}
"""The ops that compute gradients, and how many results they have. Most calls have no gradient of an aux array,
and spare the empty results."""
for _name, _count in _BACKWARDS.items():
    _results = ", ".join(["Tensor"] * _count)
    _library.define(f"{_name}({_SAVED}, {SCHEMA}) -> ({_results})", tags=(torch.Tag.pt2_compliant_tag,))
for _name, _body, _fake in (
    ("forward", _forward_op, _forward_fake),
    *((name, _backward_op, _backward_fake) for name in _BACKWARDS),
):
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attn::{_name}", _fake, lib=_library)
torch.library.register_autograd("attn::forward", differentiate, setup_context=save, lib=_library)
for _name in _BACKWARDS:
    torch.library.register_autograd(f"attn::{_name}", refuse_second_derivative, lib=_library)
for _name, _rule in (("forward", mapped_forward), *((name, mapped_backward) for name in _BACKWARDS)):
    torch.library.register_vmap(f"attn::{_name}", partial(_rule, getattr(torch.ops.attn, _name)), lib=_library)


def traced(inputs: Inputs, how: OpOptions) -> tuple[Tensor, Tensor]:
    """Runs the call as the op ``attn::forward`` and returns (out, lse)."""
    out, lse, _ = torch.ops.attn.forward(*to_call(inputs, how))
    return out, lse
