"""Forward mode: the op ``attn::jvp``, which computes the tangents of a call's results.

A call's results come from ``attn::forward``, by any backend. The tangents come from a backend that claims forward mode,
which ``attn_core.selection.forward_mode`` chooses. The op has the arguments of ``attn::forward`` behind the tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from attn_core import backends
from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.backends.shared.torch_ranges import in_range_if_on
from attn_core.call.functions import AUX
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents
from attn_core.errors import SpecError
from attn_core.expressions.properties import aux_numbers
from attn_core.selection import forward_mode
from torch_frontend.dispatch import plan, vmap
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.backend_names import requested_now
from torch_frontend.dispatch.op_arguments import SCHEMA, OpOptions, from_call, tensors_of, to_call
from torch_frontend.dispatch.ops import complete
from torch_frontend.dispatch.run_plan import check_key_ranges, four_dimensional
from torch_frontend.dispatch.wrappers import on_device

Tensor = torch.Tensor
COUNT = len(Tangents._fields)
"""How many arguments of the op come before those of ``attn::forward``."""


class TangentPlan(NamedTuple):
    """A checked call with the function of its backend that computes tangents; None for an empty call."""

    spec: AttentionSpec
    backend: str
    jvp: Any
    one_row: bool


@lru_cache(maxsize=4096)
def plan_of(
    metadata: tuple[plan.Metadata | None, ...], options: Options, requested: Any, switches: Any, arrays: tuple[int, ...]
) -> TangentPlan:
    """Checks a call and chooses the backend of its tangents; the arguments are those of ``plan.plan``.

    Args:
        arrays: the numbers of the aux arrays that have tangents.

    Raises:
        SpecError: if no backend, or not the requested one, can compute them; the message has every reason.
    """
    spec, target, names = plan.request(metadata, options, False, False, requested, switches)
    one_row = spec.packed and metadata[0] is not None and len(metadata[0][0]) == 4
    backend = forward_mode.noted(forward_mode.choose(spec, target, names, arrays))
    if spec.empty:
        return TangentPlan(spec, backend, None, one_row)
    assert metadata[0] is not None
    own = backends.load(backend, target.kind).forward_mode
    assert own is not None, "the choice is among backends that have one"
    return TangentPlan(spec, backend, on_device(own.jvp, metadata[0][2]), one_row)


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


def _jvp_op(*arguments: Any) -> tuple[Tensor, Tensor]:
    inputs, how = complete(arguments[COUNT:])
    inputs = inputs if inputs.key_ranges is None else inputs._replace(key_ranges=inputs.key_ranges.to(inputs.q.device))
    requested, switches = requested_now(how.backend)
    options, arrays = how.options._replace(aux_gradients=()), how.options.aux_gradients
    call_plan = plan_of(plan.metadata(inputs), options, requested, switches, arrays)
    spec, tangents = call_plan.spec, Tangents(*arguments[:COUNT])
    check_key_ranges(spec, inputs.key_ranges)
    if call_plan.jvp is None or all(each is None for each in tangents):
        dout, dlse = _results_like(inputs)
        return dout.zero_(), dlse.zero_()
    if call_plan.one_row:
        inputs = inputs._replace(q=inputs.q[0], k=inputs.k[0], v=inputs.v[0])
        dq, dk, dv = (None if each is None else each[0] for each in tangents[:3])
        tangents = tangents._replace(dq=dq, dk=dk, dv=dv)
    if tangents.dbias is not None:
        tangents = tangents._replace(dbias=four_dimensional(Inputs(*inputs[:3], bias=tangents.dbias)).bias)
    with switched_off(inputs.q.device):
        jvp = in_range_if_on(call_plan.jvp, call_plan.backend, "jvp")
        _, _, dout, dlse = jvp(spec, four_dimensional(inputs), tangents)
    # Contiguous, because compilers plan memory with the strides that _jvp_fake promises.
    return (dout[None] if call_plan.one_row else dout).contiguous(), dlse.contiguous()


def _results_like(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns uninitialised tensors for dout and dlse."""
    q, heads, tokens = inputs.q, inputs.q.shape[-2], inputs.q.shape[-3]
    dout = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]))
    rows = (heads, tokens) if inputs.cu_seqlens_q is not None else (q.shape[0], heads, tokens)
    return dout, q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _jvp_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _results_like(tensors_of(arguments[COUNT:]))


def _mapped(run: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmap.MappedResults:
    """Applies the vmap rule to ``run``: ``attn::jvp``, or a function with its signature."""
    inputs, how = from_call(arguments[COUNT:])
    return vmap.jvp(
        lambda *tensors: run(*tensors[:COUNT], *to_call(Inputs(*tensors[COUNT:]), how)),
        info.batch_size,
        (Tangents(*arguments[:COUNT]), Tangents(*in_dims[:COUNT])),
        inputs,
        tensors_of(in_dims[COUNT:]),
        how,
    )


class Jvp(torch.autograd.Function):
    """``attn::jvp`` with a rule for vmap; same arguments and results. Its derivative raises."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.attn.jvp(*arguments)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        refuse_second_derivative()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmap.MappedResults:
        return _mapped(Jvp.apply, info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()


def run(inputs: Inputs, how: OpOptions, moved: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Returns the tangents of out and lse.

    Args:
        moved: the tangents of the arguments of ``attn::forward``, None for those that have none.
    """
    tangents, how = tangents_of(how, tensors_of(moved))
    return Jvp.apply(*tangents, *to_call(inputs, how))  # type: ignore[no-any-return]


_library = torch.library.Library("attn", "FRAGMENT")
_TANGENTS = ", ".join(f"Tensor? {name}" for name in Tangents._fields)
_library.define(f"jvp({_TANGENTS}, {SCHEMA}) -> (Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("jvp", _jvp_op, "CompositeExplicitAutograd")
torch.library.register_fake("attn::jvp", _jvp_fake, lib=_library)
torch.library.register_autograd("attn::jvp", refuse_second_derivative, lib=_library)
torch.library.register_vmap("attn::jvp", partial(_mapped, torch.ops.attn.jvp), lib=_library)
