"""What flash-attn's functions need of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Never

import torch

from attn_core.backends.shared.autograd import without_gradient
from attn_core.call.arguments import ArrayFacts
from attn_core.call.tensors import PagedInputs
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import SpecError
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan, tensor_kinds, transforms
from torch_frontend.flash_attn import kvcache_calls
from torch_frontend.flash_attn.kvcache_calls import append, positions_of, to_numpy
from torch_frontend.paged import tables
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.plan import gather_arguments, metadata, options_of, plan_call, run
from torch_frontend.paged.rotary import apply_rotary
from torch_frontend.qkvpacked import attention_qkvpacked

Tensor = torch.Tensor


def _check_constant(name: str, tensor: Any) -> None:
    plan.check_tensor(name, tensor)
    plan.check_gradient_free(name, tensor)


def _facts(tensor: Tensor) -> ArrayFacts:
    sizes = [int(size) if isinstance(size, Tensor) else size for size in tensor.shape]
    return plan.facts(torch.Size(sizes), tensor.dtype, tensor.device)


def _searchsorted(edges: Tensor, values: Tensor) -> Tensor:
    return torch.searchsorted(edges.contiguous(), values, right=True)


def _repeated(generator: torch.Generator | None) -> torch.Generator:
    """Returns a generator that draws what ``generator``, or torch's own if None, draws next."""
    source = torch.default_generator if generator is None else generator
    copy = torch.Generator(source.device)
    copy.set_state(source.get_state())
    return copy


def _values_on_host(q: Tensor, *tables: Tensor | None) -> tuple[Any, ...] | None:
    if not q.is_cpu or torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        return None
    return to_numpy(*tables)


def _without_gradient(call: Callable[[], Any], **named: Any) -> Any:
    """Returns the results, one tensor or several, and the caches of a call that has no gradient.

    If one of the named tensors requires a gradient, as in a model outside of ``torch.no_grad``, the call runs without
    one, and a backward through its results raises SpecError. No gradient is lost without a word. A transform of
    torch.func computes both at once, so there the call is refused.
    """
    trained = {name: each for name, each in named.items() if isinstance(each, Tensor) and tensor_kinds.is_trained(each)}
    message = f"{', '.join(trained)}: a cache and pages have no gradient; call the function inside torch.no_grad()"
    with tensor_kinds.mode_around(named["q"]):
        if not trained:
            return call()
        if not torch.compiler.is_compiling() and transforms.are_observing():
            raise SpecError(f"{message}, on tensors without tangents")
        results, caches = _silent(call)
        passed = results if isinstance(results, tuple) else (results,)
        return WithoutGradient.apply(message, next(iter(trained.values())), *passed), caches


@without_gradient
def _silent(call: Callable[[], Any]) -> Any:
    return call()


class WithoutGradient(torch.autograd.Function):
    """Passes results on as functions of a tensor, and raises an error in place of its gradient."""

    @staticmethod
    def forward(ctx: Any, message: str, trained: Tensor, *results: Tensor) -> Any:
        ctx.message, ctx.size = message, trained.shape
        ctx.set_materialize_grads(False)
        passed = tuple([each.view_as(each) for each in results])
        return passed if len(passed) > 1 else passed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = next(each for each in gradients if each is not None)
        # An op, because a compiler traces this before anybody asks for a gradient.
        gradient = torch.ops.attn.refused_gradient(given, ctx.size, ctx.message)
        return None, gradient, *(None,) * len(gradients)


def _refuse(_: Tensor, size: Any, message: str) -> Never:
    raise SpecError(message)


_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    "refused_gradient(Tensor gradient, SymInt[] size, str message) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("refused_gradient", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attn::refused_gradient", lambda gradient, size, message: gradient.new_empty(size), lib=_library
)


def _planned(tensors: tuple[Tensor, Tensor, Tensor], how: dict[str, Any]) -> Callable[..., Any]:
    """Plans a call of ``paged_attention``; raises its errors, also if no backend can run the call."""
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(tensors[0]):
        return partial(paged_attention, tensors[0], **how)
    names = ("causal", "window", "softcap", "scale", "deterministic", "return_lse", "max_len_q")
    tables = how["block_table"], how["seq_lens"], how.get("cu_seqlens_q")
    beside = {name: how.get(name) for name in ("sinks", "alibi_slopes", "kv_starts")}
    given = PagedInputs(*tensors, *tables, **beside)
    inputs, options = gather_arguments(given, how.get("max_len_q")), options_of(*[how.get(name) for name in names])
    plan_call(metadata(inputs), options, override.requested())

    def attend(*_: Tensor) -> Any:  # on the pools of the plan, into which the new tokens are written
        out, lse = run(inputs, options, None)
        return (out, lse) if how["return_lse"] else out

    return attend


TORCH = Frontend(
    attention=attention,
    attention_qkvpacked=attention_qkvpacked,
    paged_attention=paged_attention,
    apply_rotary=apply_rotary,
    numpy=torch,
    updates_in_place=True,
    portable=("math",),
    check_array=plan.check_tensor,
    check_constant=_check_constant,
    facts=_facts,
    device=lambda tensor: tensor.device,
    cast=Tensor.to,
    stop_gradient=Tensor.detach,
    empty=lambda tensor, dtype: tensor.new_empty(0, dtype=dtype),
    split=torch.split,
    unstack=torch.unbind,
    searchsorted=_searchsorted,
    repeated=_repeated,
    rows_as_table=tables.rows_as_table,
    equal_offsets=tables.equal_offsets,
    positions=positions_of,
    values_on_host=_values_on_host,
    without_gradient=_without_gradient,
    seen=kvcache_calls.attend,
    on_mesh=lambda run, call, with_lse: run(call),
    planned=_planned,
    append=append,
)
