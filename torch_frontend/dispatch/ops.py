"""The ops that compilers see: ``attn::forward`` and ``attn::backward``.

Eager calls go from a plan straight to the backend. Under torch.compile and torch.export the same steps happen inside
these two opaque ops, which take the call as plain arguments: shapes may be symbolic outside, and are real inside. Eager
calls them under transforms alone (transforms.py), so their autograd registration costs eager nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from attn_core.backends import names
from attn_core.backends.shared.autograd import refuse_second_derivative
from attn_core.call.options import Options
from attn_core.call.tensors import Gradients, Inputs
from attn_core.selection import override
from torch_frontend.dispatch import offsets, vmap
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.plan import Plan, gradients_in_order, metadata, plan, run_backward, run_forward

Tensor = torch.Tensor

_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rng, bool causal, str alignment, SymInt? window_left, "
    "SymInt? window_right, float? softcap, float? scale, SymInt? max_len_q, SymInt? max_len_k, float dropout, "
    "bool deterministic, bool return_lse, bool needs_backward, bool bias_gradient, str? backend"
)
TENSORS = 10
"""How many tensors the schema has: the first fields of ``Inputs``."""

ASKED = "use_backend"
"""Before a call's names of backends: what ``use_backend`` asks for when the op runs comes before them."""


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
    backend: str | None
    """Names in order of preference, as ``joined`` puts them: torch.jit takes no list of names."""


def joined(names: tuple[str, ...] | None) -> str | None:
    """Names of backends as an op takes them."""
    return None if names is None else "\n".join(names)


def from_call(call: Sequence[Any]) -> tuple[Inputs, PlainOptions]:
    """The arguments of ``attn::forward`` as what they are."""
    return Inputs(*call[:TENSORS]), PlainOptions(*call[TENSORS:])


def _whole(call: Sequence[Any]) -> tuple[Inputs, PlainOptions]:
    """``from_call``, and offsets that have a document for every token."""
    inputs, plain = from_call(call)
    if inputs.cu_seqlens_q is None:
        return inputs, plain
    inputs, longest = offsets.completed(inputs, (plain.max_len_q, plain.max_len_k))
    return inputs, plain._replace(max_len_q=longest[0], max_len_k=longest[1])


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
    requested = tuple(plain.backend.split("\n")) if plain.backend else override.requested()
    if requested and requested[0] == ASKED:
        requested = override.requested() or requested[1:]
    if chosen is not None:
        requested = (names()[int(chosen)],)
    return plan(metadata(inputs), options, plain.needs_backward, plain.bias_gradient, requested)


def _forward_op(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, plain = _whole(arguments)
    made = _op_plan(inputs, plain)
    with switched_off(inputs.q.device):
        out, lse = run_forward(made, inputs)
    return out.contiguous(), lse.contiguous(), torch.tensor(names().index(made.backend), device="cpu")


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs = Inputs(*arguments[:TENSORS])
    q, heads, tokens = inputs.q, inputs.q.shape[-2], inputs.q.shape[-3]
    out = q.new_empty((*q.shape[:-1], inputs.v.shape[-1]))
    rows = (heads, tokens) if inputs.cu_seqlens_q is not None else (q.shape[0], heads, tokens)
    lse = q.new_empty(rows, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    return out, lse, torch.empty((), dtype=torch.int64, device="cpu")


def _backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    dout, dlse, out, lse, chosen, *call = arguments
    inputs, plain = _whole(call)
    with switched_off(inputs.q.device):
        found = run_backward(_op_plan(inputs, plain, chosen), inputs, out, lse, dout, dlse)
    nothing = inputs.q.new_empty(0)
    return tuple(nothing.clone() if gradient is None else gradient.contiguous() for gradient in found)


def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    call = arguments[5:]
    inputs, plain = from_call(call)
    wanted = (*inputs[:3], inputs.bias if plain.bias_gradient else None, inputs.sinks)
    return tuple(inputs.q.new_empty(0) if t is None else t.new_empty(t.shape) for t in wanted)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What the backward of ``attn::forward`` needs."""
    ctx.plain = PlainOptions(*inputs[TENSORS:])
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.set_materialize_grads(False)


def differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any, *, backward: Any = None
) -> tuple[Any, ...]:
    """The gradients of ``attn::forward``'s arguments, by ``attn::backward`` or what stands for it."""
    *tensors, out, lse, chosen = ctx.saved_tensors
    plain: PlainOptions = ctx.plain
    backward = backward or torch.ops.attn.backward
    found = backward(dout, dlse if plain.return_lse else None, out, lse, chosen, *tensors, *plain)
    gradients = _asked_for(found, Inputs(*tensors), plain)
    return *gradients_in_order(gradients, len(tensors)), *(None,) * len(plain)


def _asked_for(found: Sequence[Tensor], inputs: Inputs, plain: PlainOptions) -> Gradients:
    """The results of ``attn::backward`` without those that stand for nothing."""
    dbias = found[3] if plain.bias_gradient else None
    return Gradients(found[0], found[1], found[2], dbias, None if inputs.sinks is None else found[4])


def mapped_forward(run: Any, info: Any, in_dims: tuple[Any, ...], *call: Any) -> vmap.Found:
    """vmap of ``run``, which is ``attn::forward`` or stands for it."""
    inputs, plain = from_call(call)
    return vmap.forward(
        lambda *tensors: run(*tensors[:TENSORS], *plain),
        info.batch_size,
        inputs,
        Inputs(*in_dims[:TENSORS]),
        plain.dropout,
    )


def mapped_backward(run: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> vmap.Found:
    """vmap of ``run``, which is ``attn::backward`` or stands for it."""
    inputs, plain = from_call(arguments[5:])
    return vmap.backward(
        lambda *tensors: run(*tensors[: 5 + TENSORS], *plain),
        info.batch_size,
        arguments[:5],
        in_dims[:5],
        inputs,
        Inputs(*in_dims[5 : 5 + TENSORS]),
        plain.dropout,
        summed=plain.bias_gradient or inputs.sinks is not None,
    )


def mapped_gradients(
    made: Plan, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """A plan's gradients by ``attn::backward``, which has a rule for the vmap that is at work."""
    spec = made.spec
    plain = PlainOptions(
        spec.causal,
        spec.alignment,
        *spec.window,
        spec.softcap,
        spec.scale,
        spec.max_len_q,
        spec.max_len_k,
        spec.dropout,
        spec.deterministic,
        spec.return_lse,
        spec.needs_backward,
        spec.bias_gradient,
        made.backend,
    )
    chosen = torch.tensor(names().index(made.backend), device="cpu")
    found = torch.ops.attn.backward(dout, dlse, out, lse, chosen, *inputs[:TENSORS], *plain)
    return _asked_for(found, inputs, plain)


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
torch.library.register_autograd("attn::forward", differentiate, setup_context=save, lib=_library)
torch.library.register_autograd("attn::backward", refuse_second_derivative, lib=_library)
for _name, _rule in (("forward", mapped_forward), ("backward", mapped_backward)):
    torch.library.register_vmap(f"attn::{_name}", partial(_rule, getattr(torch.ops.attn, _name)), lib=_library)


def traced(inputs: Inputs, plain: PlainOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) through the op."""
    out, lse, _ = torch.ops.attn.forward(*inputs[:TENSORS], *plain)
    return out, lse
