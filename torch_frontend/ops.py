"""The ops that compilers see: ``attn::forward`` and ``attn::backward``.

Eager calls go from a plan straight to the backend. Under torch.compile and torch.export the same steps happen inside
these two opaque ops, which take the call as plain arguments: shapes may be symbolic outside, and are real inside. Eager
never calls them, so their autograd registration costs eager nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_core import override
from attn_core.backends import NAMES, Gradients, Inputs
from attn_core.options import Options
from torch_frontend.plan import Plan, gradients_in_order, metadata, plan, run_backward, run_forward

Tensor = torch.Tensor

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, bool causal, str alignment, SymInt? window_left, "
    "SymInt? window_right, float? softcap, float? scale, SymInt? max_len_q, SymInt? max_len_k, float dropout, "
    "bool deterministic, bool return_lse, bool needs_backward, bool bias_gradient, str[]? backend"
)
_OPTIONS_AT = len(Inputs._fields)


class PlainOptions(NamedTuple):
    """The arguments of the ops behind the tensors, in the schema's order."""

    causal: bool
    alignment: str
    window_left: int | None
    window_right: int | None
    softcap: float | None
    scale: float | None
    max_len_q: int | None
    max_len_k: int | None
    dropout: float
    deterministic: bool
    return_lse: bool
    needs_backward: bool
    bias_gradient: bool
    backend: list[str] | None


def _op_plan(inputs: Inputs, plain: PlainOptions, chosen: Tensor | None = None) -> Plan:
    """The plan of a call; for a backward, on the backend that the forward chose."""
    options = Options(
        causal=plain.causal,
        alignment=plain.alignment,
        window=(plain.window_left, plain.window_right),
        softcap=plain.softcap,
        scale=plain.scale,
        max_len_q=plain.max_len_q,
        max_len_k=plain.max_len_k,
        dropout=plain.dropout,
        deterministic=plain.deterministic,
        return_lse=plain.return_lse,
    )
    requested = tuple(plain.backend) if plain.backend else override.requested()
    if chosen is not None:
        requested = (NAMES[int(chosen)],)
    return plan(metadata(inputs), options, plain.needs_backward, plain.bias_gradient, requested)


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, plain = Inputs(*arguments[:_OPTIONS_AT]), PlainOptions(*arguments[_OPTIONS_AT:])
    made = _op_plan(inputs, plain)
    out, lse = run_forward(made, inputs)
    return out.contiguous(), lse.contiguous(), torch.tensor(NAMES.index(made.backend))


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*arguments[:_OPTIONS_AT])
    q, heads, tokens = inputs.q, inputs.q.shape[-2], inputs.q.shape[-3]
    out = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]))
    rows = (heads, tokens) if inputs.cu_seqlens_q is not None else (q.shape[0], heads, tokens)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse, torch.empty((), dtype=torch.int64)


def _backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    dout, dlse, out, lse, chosen, *call = arguments
    inputs, plain = Inputs(*call[:_OPTIONS_AT]), PlainOptions(*call[_OPTIONS_AT:])
    found = run_backward(_op_plan(inputs, plain, chosen), inputs, out, lse, dout, dlse)
    nothing = inputs.q.new_empty(0)
    return tuple(nothing.clone() if gradient is None else gradient.contiguous() for gradient in found)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = arguments[5:]
    inputs, plain = Inputs(*call[:_OPTIONS_AT]), PlainOptions(*call[_OPTIONS_AT:])
    wanted = (*inputs[:3], inputs.bias if plain.bias_gradient else None, inputs.sinks)
    return tuple(inputs.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.plain = PlainOptions(*inputs[_OPTIONS_AT:])
    ctx.save_for_backward(*inputs[:_OPTIONS_AT], *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple[Any, ...]:
    *tensors, out, lse, chosen = ctx.saved_tensors
    plain: PlainOptions = ctx.plain
    found = torch.ops.attn.backward(dout, dlse if plain.return_lse else None, out, lse, chosen, *tensors, *plain)
    dbias = found[3] if plain.bias_gradient else None
    dsinks = found[4] if Inputs(*tensors).sinks is not None else None
    return (
        *gradients_in_order(Gradients(found[0], found[1], found[2], dbias, dsinks), len(tensors)),
        *(None,) * len(plain),
    )


def _refuse_second_derivative(ctx: Any, *_: Any) -> None:
    raise RuntimeError("attention has no second derivative: its backward cannot be differentiated again")


# torch's compiler caches keep programs by the names of their ops: once released, a changed schema needs a new op name.
_library = torch.library.Library("attn", "DEF")
_library.define(f"forward({_SCHEMA}) -> (Tensor, Tensor, Tensor)", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, Tensor chosen, {_SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _name, _body, _fake in (("forward", _forward_op, _forward_fake), ("backward", _backward_op, _backward_fake)):
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attn::{_name}", _fake, lib=_library)
torch.library.register_autograd("attn::forward", _differentiate, setup_context=_save, lib=_library)
torch.library.register_autograd("attn::backward", _refuse_second_derivative, lib=_library)


def traced(inputs: Inputs, plain: PlainOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) through the op."""
    out, lse, _ = torch.ops.attn.forward(*inputs, *plain)
    return out, lse
