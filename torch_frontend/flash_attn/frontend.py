"""What flash-attn's functions need of torch: its operations, the steps of a call on a cache, and eager calls like it.

Calls on a cache without gradients run by the table of prepared calls, see ``dispatch.prepared``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Never

import torch

from attn_core.backends import plain_backend
from attn_core.backends.shared.autograd import without_gradient
from attn_core.call.arguments import ArrayFacts
from attn_core.call.cache_rows import OPTIONS, CacheRows
from attn_core.call.options import PAGED, check_paged_options, is_plain_window, requested_names
from attn_core.call.tensors import PagedInputs
from attn_core.dropins.flash_attn.cache import (
    Cached,
    append_arguments,
    check_combination,
    check_facts,
    check_values,
    whole_length,
)
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import SpecError
from attn_core.paged import rotary as core_rotary
from attn_core.selection import override
from torch_frontend.attention import attention
from torch_frontend.dispatch import plan, tensor_kinds, transforms
from torch_frontend.dispatch.after_import import after_import
from torch_frontend.dispatch.plan import Results, on_device
from torch_frontend.dispatch.prepared import Prepared, Request, find
from torch_frontend.paged import dense_caches, paged_calls, tables
from torch_frontend.paged.append import append_kv, gpu_writer
from torch_frontend.paged.attention import paged_attention
from torch_frontend.paged.plan import gather_arguments, metadata, options_of, plan_call, run
from torch_frontend.paged.rotary import apply_rotary, repeated_on_gpu
from torch_frontend.qkvpacked import attention_qkvpacked

Tensor = torch.Tensor
_OPTIONS = ("causal", "window", "softcap", "scale", "deterministic", "return_lse")


def _check_constant(name: str, tensor: Tensor) -> None:
    plan.check_tensor(name, tensor)
    plan.check_gradient_free(name, tensor)


def _facts(tensor: Tensor) -> ArrayFacts:
    sizes = [int(size) if isinstance(size, Tensor) else size for size in tensor.shape]
    return plan.facts(torch.Size(sizes), tensor.dtype, tensor.device)


def _attention_to_rows(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, **options: Any) -> Any:
    plan.check_tensor("q", q)
    plan.check_tensor("k", k)
    # ``attention`` refuses only queries that number the keys, with lengths on the host. It has a short way for others.
    on_host = not torch.compiler.is_compiling() and not getattr(lengths, "is_cuda", False)
    if on_host and q.ndim == k.ndim == 4 and q.shape[1] == k.shape[1]:
        every = {**OPTIONS, **options, "layout": "bshd"}
        return dense_caches.attend(attention, (q, k, v), CacheRows(lengths), every, shifted=True)
    return attention(q, k, v, kv_lengths=lengths, **options)


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
    def forward(ctx: Any, message: str, trained: Tensor, *results: Tensor) -> Tensor | tuple[Tensor, ...]:
        ctx.message, ctx.size = message, trained.shape
        ctx.set_materialize_grads(False)
        passed = tuple([each.view_as(each) for each in results])
        return passed if len(passed) > 1 else passed[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = next(each for each in gradients if each is not None)
        # An op, because a compiler traces this before anybody asks for a gradient.
        gradient = torch.ops.attn.refused_gradient(given, ctx.size, ctx.message)
        return None, gradient, *(None,) * len(gradients)


def _refuse(_: Tensor, size: object, message: str) -> Never:
    raise SpecError(message)


_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    "refused_gradient(Tensor gradient, SymInt[] size, str message) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("refused_gradient", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake(
    "attn::refused_gradient", lambda gradient, size, message: gradient.new_empty(size), lib=_library
)


def _planned(tensors: tuple[Tensor, Tensor, Tensor], how: dict[str, Any]) -> Callable[..., Results]:
    """Plans a call of ``paged_attention``; raises its errors, also if no backend can run the call."""
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(tensors[0]):
        return partial(paged_attention, tensors[0], **how)
    tables = how["block_table"], how["seq_lens"], how.get("cu_seqlens_q")
    beside = {name: how.get(name) for name in ("sinks", "alibi_slopes", "kv_starts")}
    given = PagedInputs(*tensors, *tables, **beside)
    inputs, options = gather_arguments(given, how.get("max_len_q")), options_of(*[how.get(name) for name in PAGED])
    plan_call(metadata(inputs), options, override.requested())

    def attend(*_: Tensor) -> Results:  # on the pools of the plan, into which the new tokens are written
        out, lse = run(inputs, options, None)
        return (out, lse) if how["return_lse"] else out

    return attend


class _Steps(NamedTuple):
    """A checked call: its sizes, and the functions that run its steps."""

    device: torch.device
    batch: int
    tokens: int
    """The queries of each sequence."""
    new: int
    capacity: int
    on_host: bool
    """Whether the values of tables are checked."""
    append: Callable[..., bool] | None
    """Appends on a GPU, and writes the lengths that count the new tokens; None: the general path does."""
    rotate: Callable[..., Tensor]
    paged: paged_calls.Run | None
    """The attention; None if its backend has no fast path for it."""
    interleaved: bool
    """Whether the rotation is of neighbouring channels."""


def attend(call: Cached, interleaved: bool, options: dict[str, Any], table: str, longest: int | None) -> Results | None:
    """Returns the results of a call as ``kvcache.attend`` does, whose arguments these are; None if that must run it."""
    if options.get("sinks") is not None or not is_plain_window(options["window"]):
        return None
    single = type(call.cache_seqlens) is int
    q, k_cache, v_cache, *others = call._replace(cache_seqlens=None) if single else call
    values = [options[name] for name in _OPTIONS]
    run = find(_prepare, q, k_cache, v_cache, tuple(others), (single, interleaved, table, longest, *values), None)
    return None if run is None else run(call, options)


def _run(seen: _Steps, call: Cached, options: dict[str, Any]) -> Results:
    """Runs the steps of a checked call."""
    q, k_cache, v_cache, k, v, cos, sin, seqlens, index = call[:9]
    device, batch, tokens, new = seen[:4]
    # The lengths before the new tokens: a number for all, none for full caches, or a tensor.
    if type(seqlens) is int:
        length = whole_length(seqlens, seen.capacity, new)
        seqlens = torch.full((batch,), length, dtype=torch.int32, device=device)
    elif seqlens is None:
        seqlens = torch.full((batch,), seen.capacity, dtype=torch.int32, device=device)
    if seen.on_host:
        check_host_values(call, seqlens, seen.capacity, new)
    pages = call.block_table
    if pages is None:  # a dense cache: each row is a page, its own or the one of cache_batch_idx
        pages = tables.rows_as_table(batch, device) if index is None else index.unsqueeze(1)
    if cos is not None:
        banded = options["causal"] or options["window"] is not None
        q = seen.rotate(q, cos, sin, positions_of(seqlens, tokens, banded), seen.interleaved)
    # Append the new tokens; ``lengths`` count them.
    if seen.append is not None:
        offsets = () if new == 1 else (tables.equal_offsets(batch, new, device),)
        angles = () if cos is None else (cos, sin)
        keys, values = (each.squeeze(1) if new == 1 else each.flatten(0, 1) for each in (k, v))
        lengths = torch.empty_like(seqlens)  # the append fills it, which saves a launch
        seen.append(k_cache, v_cache, keys, values, pages, seqlens, *offsets, *angles, lengths)
    elif new:
        lengths = seqlens + new
        append(call, pages, lengths, seen.interleaved)
    else:
        lengths = seqlens
    # Attend on the pages: by the backend's fast path, or if it has none for these tensors, as any paged call.
    offsets_q = None if tokens == 1 else tables.equal_offsets(batch, tokens, device)
    queries = q.squeeze(1) if tokens == 1 else q.flatten(0, 1)  # without the axis of size 1, in less time
    if seen.paged is not None:
        more = () if offsets_q is None else (offsets_q, None, None)
        results = seen.paged(queries, k_cache, v_cache, pages, lengths, None, *more)
        if results is not None:
            return dense_caches.in_rows(results, call.q, options["return_lse"])
    how = {**options, "block_table": pages, "seq_lens": lengths, "kv_starts": call.cache_leftpad}
    how |= {"alibi_slopes": call.alibi_slopes}
    if offsets_q is not None:
        how |= {"cu_seqlens_q": offsets_q, "max_len_q": tokens}
    results = paged_attention(queries, k_cache, v_cache, **how)
    both = results if options["return_lse"] else (results, None)
    return dense_caches.in_rows(both, call.q, options["return_lse"])


def _prepare(request: Request) -> Prepared | None:
    """Prepares a call; the entries are those of the fields of ``Cached``, None for an absent one and for an int."""
    single, interleaved, table, longest, *values = request.options
    entries, requested = request.entries, requested_names(request.requested)
    if request.needs:
        return None
    call = Cached(*entries)
    facts = Cached(*(entry and plan.facts(*entry) for entry in entries))
    check_combination(facts._replace(cache_seqlens=0) if single else facts, table)
    check_paged_options(*values, longest)  # type: ignore[call-arg]
    check_facts(facts, table)
    (shape, _, device), rows = call.q, call.k_cache[0][0]
    places = (call.cache_seqlens, call.block_table, call.cache_batch_idx, call.cache_leftpad)
    is_whole = all([each is None for each in places]) and not single and rows == shape[0]
    if call.cu_seqlens_q is not None or is_whole or device.type not in ("cpu", "cuda"):
        return None
    (batch, tokens), new = shape[:2], 0 if call.k is None else call.k[0][1]
    if 0 in shape or (call.k is not None and new == 0):
        return None
    pages = call.block_table or (torch.Size((batch, 1)), torch.int32, device)
    lengths = torch.Size((batch,)), torch.int32, device
    tables = call._replace(block_table=pages, cache_seqlens=lengths)
    capacity = pages[0][1] * call.k_cache[0][1]
    write = None if call.k is None or device.type == "cpu" else _writer(tables, new, interleaved)
    paged = _attention(tables, tokens, requested, tuple(values))

    def build(paged_run: paged_calls.Run | None) -> Callable[..., Results]:
        on_host, rotate = device.type == "cpu", _rotation(call)
        return partial(
            _run, _Steps(device, batch, tokens, new, capacity, on_host, write, rotate, paged_run, interleaved)
        )

    reads: Any = "all" if device.type == "cpu" else None
    return Prepared(build(paged and paged.run), lambda: build(paged and paged.in_ranges()), reads)


def _writer(call: Cached, new: int, interleaved: bool) -> Callable[..., bool] | None:
    """Returns the append on a GPU for a call with tables."""
    k, v = (_flat(entry) for entry in (call.k, call.v))
    offsets = None if new == 1 else _offsets(call)
    tables = call.block_table, call.cache_seqlens, offsets, None, call.rotary_cos, call.rotary_sin, None
    return gpu_writer((call.k_cache, call.v_cache, k, v, *tables), interleaved, new)


def _rotation(call: Cached) -> Callable[..., Tensor]:
    """Checks the metadata of a rotation of the queries, and returns the function that rotates them."""
    if call.rotary_cos is None or call.q[2].type == "cpu":
        return _rotate_by_torch
    facts = [plan.facts(*entry) for entry in (call.q, call.rotary_cos, call.rotary_sin)]
    positions = plan.facts(torch.Size(call.q[0][:2]), torch.int32, call.q[2])
    core_rotary.check_apply(dict(zip(("x", "cos", "sin", "positions"), (*facts, positions), strict=True)))
    return on_device(repeated_on_gpu(), call.q[2])  # type: ignore[no-any-return]


def _rotate_by_torch(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    return apply_rotary(q, cos, sin, positions=positions, interleaved=interleaved)


def _attention(
    call: Cached, tokens: int, requested: tuple[str, ...] | None, values: tuple[Any, ...]
) -> Prepared | None:
    """Prepares the attention of a call with tables; None if its backend has no fast path for it.

    Raises NoBackendError if none can run it.
    """
    tensors = (call.k_cache, call.v_cache, call.block_table, call.cache_seqlens)
    if call.alibi_slopes is not None or call.cache_leftpad is not None:
        offsets = None if tokens == 1 else _offsets(call)
        slopes, starts = call.alibi_slopes, call.cache_leftpad
        entries = PagedInputs(_flat(call.q), *tensors, offsets, alibi_slopes=slopes, kv_starts=starts)
        longest = None if tokens == 1 else tokens
        plan_call(entries, options_of(*values, longest), requested)  # type: ignore[call-arg]
        return None
    return paged_calls.prepare_rows((call.q, *tensors, None), values, None, requested)


def _flat(entry: plan.Metadata) -> plan.Metadata:
    """Returns the metadata of ``[batch, tokens, ...]`` as ``[batch * tokens, ...]``."""
    (batch, tokens, *rest), dtype, device = entry
    return torch.Size((batch * tokens, *rest)), dtype, device


def _offsets(call: Cached) -> plan.Metadata:
    return torch.Size((call.q[0][0] + 1,)), torch.int32, call.q[2]


def check_host_values(call: Cached, seqlens: Tensor | None, capacity: int, new: int) -> None:
    """Checks the values of tables on the CPU; seqlens: cache_seqlens as a tensor."""
    check_values(call, to_numpy(seqlens, call.cache_batch_idx, call.cache_leftpad), capacity, new)


def to_numpy(*tables: Tensor | None) -> tuple[Any, ...]:
    """Returns tables on the CPU as numpy arrays."""
    return tuple([None if each is None else each.numpy() for each in tables])


def positions_of(before: Tensor, tokens: int, banded: bool) -> Tensor:
    """Returns the rotary position of each query, int32 ``[batch, tokens]``."""
    first = before.unsqueeze(1)
    if tokens == 1:
        return first
    return first + tables.places(tokens, before.device) if banded else first.expand(-1, tokens)


def append(call: Cached, pages: Tensor, seq_lens: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Appends the new tokens, and returns both caches; seq_lens count the tokens."""
    batch, new = call.k.shape[:2]
    offsets = None if new == 1 else tables.equal_offsets(batch, new, pages.device)
    tensors, keywords = append_arguments(call, pages, seq_lens, interleaved, offsets)
    append_kv(*tensors, **keywords)
    return call.k_cache, call.v_cache


def _portable() -> tuple[str, ...]:
    return (plain_backend("torch"),)


def _keep_from_compiler() -> None:
    """Lets Dynamo take the name as a constant: it could not trace how records are found."""
    torch.compiler.assume_constant_result(_portable)


after_import("torch._dynamo", _keep_from_compiler)  # the function itself would import Dynamo


TORCH = Frontend(
    attention=attention,
    attention_qkvpacked=attention_qkvpacked,
    paged_attention=paged_attention,
    apply_rotary=apply_rotary,
    attention_to_rows=_attention_to_rows,
    numpy=torch,
    updates_in_place=True,
    portable=_portable,
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
    seen=attend,
    on_mesh=lambda run, call, with_lse: run(call),
    planned=_planned,
    append=append,
)
