"""A context-parallel call with its derivative: an autograd function, and two ops for torch.compile.

Eager calls save the kernels' operands. torch.compile sees two opaque ops, which take the request as plain arguments;
their backward exchanges heads again. Apart from the public functions, which check arguments and build the request.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core.backends.shared.autograd import without_create_graph
from attn_core.call import observe
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.request import Metadata, Request
from attn_core.selection import override
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.agreement import SharedCall, prepare_together
from torch_frontend.context_parallel.mesh import find_axis
from torch_frontend.context_parallel.prepare import RankPlan
from torch_frontend.context_parallel.repeated_calls import RepeatedCall
from torch_frontend.dispatch import autocast, ops, run_plan
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.op_arguments import OPTIONS_SCHEMA, OpOptions, join_names

Tensor = torch.Tensor


class Attention(torch.autograd.Function):
    """Arguments: the call, q, k, v ``[batch, shard, heads, dim]``, and sinks or None."""

    @staticmethod
    def forward(
        ctx: Any, call: SharedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        with_lse = call.request.options.return_lse
        results, residuals = forward.forward(call.plan, q, k, v, sinks, with_lse=with_lse, keep=True)
        # A thread of autograd, which has a context of its own, may run the backward.
        ctx.call, ctx.ranges = call, observe.ranges_enabled()
        # One flat list, because autograd saves tensors and no tuples of them.
        ctx.save_for_backward(sinks, *(tensor for group in residuals for tensor in group))
        ctx.set_materialize_grads(False)
        return tuple(results) if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        call: SharedCall = ctx.call
        try:
            sinks, *tensors = _saved_tensors(ctx)
        except Exception as error:
            if call.meeting is not None:
                call.meeting.refuse(error)
            raise
        call.begin(call.backward)
        size = len(forward.Residuals._fields)
        residuals = [forward.Residuals(*tensors[at : at + size]) for at in range(0, len(tensors), size)]
        if dout is None:
            assert dlse is not None
            batch, heads, shard = dlse.shape
            # Only lse has a gradient. The exchanges and kernels still need a dout.
            out = residuals[0].out
            dout = out.new_zeros(batch, shard, heads, out.shape[3])
        with autocast.switched_off(dout.device), observe.ranges(ctx.ranges):
            dlse = _lse_gradient(call.plan, dout, dlse)
            gradients = backward.backward(call.plan, residuals, sinks, dout, dlse)
        call.end()
        return None, *gradients


@without_create_graph
def _saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Returns what the forward saved. Raises if a graph is recorded, was freed, or if a tensor was overwritten."""
    return ctx.saved_tensors


def _lse_gradient(plan: RankPlan, dout: Tensor, dlse: Tensor | None) -> Tensor | None:
    """Returns dlse, or zeros if only other ranks' losses depend on lse: ranks that exchange heads must all send one."""
    if dlse is not None or not plan.call.spec.return_lse or plan.inner.size == 1:
        return dlse
    return dout.new_zeros((dout.shape[0], dout.shape[2], dout.shape[1]), dtype=plan.lse_dtype)


def run(
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    repeated: RepeatedCall | None = None,
) -> tuple[Tensor, ...]:
    """Returns (out,) or (out, lse) of an eager call.

    Args:
        repeated: what earlier calls found out; this call fills it in if there were none.
    """
    call = None if repeated is None else repeated.known
    if call is None:
        call = prepare_together(request)
        if repeated is not None:
            repeated.remember(call)
    call.begin(call.forward)
    with_lse = request.options.return_lse
    with autocast.switched_off(q.device):
        if request.needs_backward:
            output = Attention.apply(call, q, k, v, sinks)
            results = list(output) if with_lse else [output]
        else:
            results, _ = forward.forward(call.plan, q, k, v, sinks, with_lse=with_lse, keep=False)
    call.end()
    if sinks is None or not with_lse:
        return tuple(results)
    return results[0], run_plan.fill_with_sinks(results[1], sinks, call.plan.query_count)


def _leave_to_python() -> None:
    """Makes Dynamo call ``run`` instead of tracing it: it traces what runs after a break of the graph, and cannot trace
    the offsets of documents in numpy, which break it."""
    globals()["run"] = torch.compiler.disable(run)


after_import("torch._dynamo", _leave_to_python)  # torch.compiler.disable itself would import Dynamo


# The ops

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? sinks, str outer, str inner, str strategy, str layout, SymInt q_len, "
    f"SymInt kv_len, SymInt head_groups, SymInt[]? documents, {OPTIONS_SCHEMA}"
)
TENSORS = 4
"""How many of an op's arguments are tensors; they come first."""


def op_arguments(request: Request) -> tuple[object, ...]:
    """Returns the arguments of the ops that follow the tensors."""
    outer, *inner = request.axes
    return (
        outer,
        inner[0] if inner else "",
        request.strategy,
        request.layout,
        *request.lengths,
        request.head_groups,
        None if request.documents is None else list(request.documents),
        *OpOptions(request.options, request.needs_backward, False, join_names(request.requested)).arguments,
    )


def _request_of(arguments: tuple[Any, ...]) -> Request:
    """Returns the request that an op's arguments describe; the inverse of ``op_arguments``."""
    q, k, v, sinks, outer, inner, strategy, layout, q_len, kv_len, head_groups, offsets, *rest = arguments
    how = OpOptions.of(rest)
    names = (outer, inner) if inner else (outer,)
    sizes: Any = tuple(find_axis(name).size for name in names)
    return Request(
        tensor_metadata(q, k, v, sinks),
        (q_len, kv_len),
        None if offsets is None else tuple(offsets),
        how.options,
        strategy,
        layout,
        head_groups,
        names,
        sizes,
        q.device,
        how.needs_backward,  # type: ignore[arg-type]
        requested=tuple(how.backend.split("\n")) if how.backend else override.requested(),
    )


def tensor_metadata(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Metadata | None, ...]:
    """Returns (shape, dtype) of each tensor."""
    sink = None if sinks is None else (sinks.shape, sinks.dtype)
    return (q.shape, q.dtype), (k.shape, k.dtype), (v.shape, v.dtype), sink


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = prepare_together(_request_of(arguments), compiled=True)
    call.begin(call.forward)
    with autocast.switched_off(arguments[0].device):
        (out, lse), _ = forward.forward(call.plan, *arguments[:TENSORS], with_lse=True, keep=False)
    call.end()
    # The mesh is known inside the op only, so the op also returns the number that fill_with_sinks needs.
    count = torch.full((), call.plan.query_count, device=out.device)
    # Contiguous, because compilers plan memory with the strides that _forward_fake promises.
    return out.contiguous(), lse.contiguous(), count


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return *ops.results_like(Inputs(q, k, v)), q.new_empty((), dtype=torch.int64)


def _backward_op(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, (q, k, v, sinks) = prepare_together(_request_of(arguments), compiled=True), arguments[:TENSORS]
    call.begin(call.backward)
    with autocast.switched_off(q.device):
        # An op's saved tensors are its arguments and results, so the exchanged heads are not among them.
        residuals = forward.recompute_residuals(call.plan, q, k, v, out, lse)
        gradients = backward.backward(call.plan, residuals, sinks, dout, _lse_gradient(call.plan, dout, dlse))
    call.end()
    dq, dk, dv, dsinks = (None if each is None else each.contiguous() for each in gradients)
    # An op must return a tensor for each result.
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks  # type: ignore[return-value]


def _backward_fake(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, sinks = arguments[:TENSORS]
    dq, dk, dv = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v))
    return dq, dk, dv, q.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, sinks = inputs[:TENSORS]
    ctx.rest = inputs[TENSORS:]
    ctx.save_for_backward(q, k, v, sinks, *output[:2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    nothing = (None,) * len(ctx.rest)
    if dout is None and dlse is None:
        return (None,) * TENSORS + nothing
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv, dsinks = torch.ops.attn.context_backward(dout, dlse, out, lse, q, k, v, sinks, *ctx.rest)
    return dq, dk, dv, None if sinks is None else dsinks, *nothing


# FRAGMENT, because dispatch.ops has defined the namespace.
_library = torch.library.Library("attn", "FRAGMENT")
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define(f"context_forward({_SCHEMA}) -> (Tensor, Tensor, Tensor)", tags=_tags)
_library.define(
    f"context_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_tags,
)
for _name, _body, _fake in (
    ("context_forward", _forward_op, _forward_fake),
    ("context_backward", _backward_op, _backward_fake),
):
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attn::{_name}", _fake, lib=_library)
torch.library.register_autograd("attn::context_forward", _differentiate, setup_context=_save, lib=_library)


def run_traced(request: Request, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call that torch.compile traces, through the ops."""
    out, lse, count = torch.ops.attn.context_forward(q, k, v, sinks, *op_arguments(request))
    return out, lse if sinks is None else run_plan.fill_with_sinks(lse, sinks, count)
