"""From the description of a context-parallel call to what this rank does in it: strategy, plan, kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import ContextCall, context_call
from attn_core.context_parallel.cost.choose import Choice, Explanation, choose
from attn_core.context_parallel.cost.machine import Constants
from attn_core.errors import ShapeError
from attn_core.selection import Target
from torch_frontend.context_parallel.agreement import agree
from torch_frontend.context_parallel.exchange import Axis, axis
from torch_frontend.context_parallel.program import Work, program
from torch_frontend.dispatch.plan import device_name

Tensor = torch.Tensor


class Ranks(NamedTuple):
    """The process groups of a call by name, and how its row is shared.

    Attributes:
        outer, inner: of two axes; of one axis it is the outer one, and inner is "".
        strategy: "" to choose one.
        q_len, kv_len: of the whole row.
    """

    outer: str
    inner: str
    strategy: str
    layout: str
    q_len: int
    kv_len: int
    head_groups: int


class Question(NamedTuple):
    """All that a call is, besides the values of its tensors."""

    shapes: tuple[torch.Size, torch.Size, torch.Size]
    sinks: tuple[torch.Size, torch.dtype] | None
    dtype: torch.dtype
    device: torch.device
    ranks: Ranks
    options: Options
    documents: tuple[int, ...] | None
    needs_backward: bool
    requested: tuple[str, ...] | None


class Prepared(NamedTuple):
    """What a rank does in a call, and why it is done so."""

    work: Work
    choice: Choice


def prepared(asked: Question) -> Prepared:
    """A call once it is planned and compared between ranks; once for every call of its kind.

    What only some ranks refuse, or plan otherwise, is an error on every rank: the others would wait for them.
    """
    return _compared(asked, axis(asked.ranks.outer), axis(asked.ranks.inner))


@lru_cache(maxsize=64)
def _compared(asked: Question, outer: Axis, inner: Axis) -> Prepared:
    try:
        found = planned(asked, outer, inner)
    except Exception as error:
        agree(asked, f"{type(error).__name__}: {str(error).splitlines()[0]}", outer, inner)
        raise
    names = sorted({name for _, name in found.work.program.call.backends})
    agree(asked, f"{found.choice.strategy} on {', '.join(names)}", outer, inner)
    return found


@lru_cache(maxsize=64)
def planned(asked: Question, outer: Axis, inner: Axis) -> Prepared:
    """The same without a word to other ranks."""
    spec, ranks, device = _whole(asked), asked.ranks, device_name(asked.device)
    axes = (outer.size, inner.size) if ranks.inner else (outer.size,)
    choice = choose(spec, asked.documents, ranks.layout, axes, Constants.of(device), None, ranks.strategy or None)
    strategy = choice.strategy or ""
    if strategy == "ulysses":
        outer, inner = Axis("", 1, 0), outer
    call = context_call(
        *(spec, asked.documents, strategy, ranks.layout, outer.size, inner.size, ranks.head_groups),
        *(Target.here("torch", device), asked.requested),
    )
    _check_shards(asked, call)
    return Prepared(Work(program(call, outer.rank, asked.device), outer, inner), choice)


def _whole(asked: Question) -> AttentionSpec:
    """The call as on one device."""
    (batch, _, heads, dim), (k_batch, _, kv_heads, k_dim), (v_batch, _, v_heads, value_dim) = asked.shapes
    dtype, device = str(asked.dtype).removeprefix("torch."), str(asked.device)

    def facts(*shape: int) -> ArrayFacts:
        packed = asked.documents is not None and shape[0] == 1  # more rows than one are refused as they are
        return ArrayFacts(shape[1:] if packed else shape, dtype, device)

    q_len, kv_len = asked.ranks.q_len, asked.ranks.kv_len
    arrays = Arrays(
        facts(batch, q_len, heads, dim),
        facts(k_batch, kv_len, kv_heads, k_dim),
        facts(v_batch, kv_len, v_heads, value_dim),
    )
    if asked.documents is not None:
        offsets = ArrayFacts((len(asked.documents),), "int32", device)
        arrays = arrays._replace(cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    if asked.sinks is not None:
        shape, sinks_dtype = asked.sinks
        arrays = arrays._replace(sinks=ArrayFacts(tuple(shape), str(sinks_dtype).removeprefix("torch."), device))
    return build_spec(arrays, asked.options, needs_backward=asked.needs_backward, bias_gradient=False)


def _check_shards(asked: Question, call: ContextCall) -> None:
    layouts = (call.plan.q_layout, call.plan.k_layout, call.plan.k_layout)
    for name, shape, held in zip("qkv", asked.shapes, layouts, strict=True):
        if shape[1] != held.shard:
            raise ShapeError(
                f"{name}: expected shards of {held.shard} positions, {held.length} over {held.world} ranks in a "
                f"{held.kind} layout, got {shape[1]}; shard_sequence makes them, and length= is that of the whole row"
            )


def explanation(asked: Question) -> Explanation:
    """The Explanation of a call."""
    found = planned(asked, axis(asked.ranks.outer), axis(asked.ranks.inner))
    return Explanation(found.choice, found.work.program.call)
