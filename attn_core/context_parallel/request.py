"""A context-parallel call as both frontends describe it: its arguments checked, its strategy chosen, its plan made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.options import Options
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens, is_host_int
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import ContextCall, context_call
from attn_core.context_parallel.cost.choose import Axes, Explanation, check_strategy, choose, parts_and_members
from attn_core.context_parallel.cost.machine import Constants
from attn_core.errors import ShapeError, SpecError
from attn_core.selection import Target

Metadata = tuple[tuple[int, ...], Any]
"""The shape and the dtype of an array."""
Documents = tuple[int, ...] | None


class Request(NamedTuple):
    """Everything that decides a context-parallel call, which excludes the values of its arrays.

    Attributes:
        shards: of one rank's q, k, v and sinks; None for no sinks.
        lengths: positions of the whole row, of q and of k.
        documents: offsets of the whole row's packed documents, or None.
        strategy: "" to choose one by the cost model.
        axes, sizes: names and sizes of the mesh axes that share the row: one axis, or (outer, inner).
        device: where the arrays are, as the framework names it.
        requested: the backends that the caller named, or None for automatic choice.
    """

    shards: tuple[Metadata | None, ...]
    lengths: tuple[int, int]
    documents: Documents
    options: Options
    strategy: str
    layout: str
    head_groups: int
    axes: tuple[str, ...]
    sizes: Axes
    device: Any
    needs_backward: bool
    requested: tuple[str, ...] | None

    @property
    def packed(self) -> bool:
        """Whether the row holds documents."""
        return self.documents is not None


def build_request(
    arrays: Sequence[Metadata],
    sinks: Metadata | None,
    *,
    strategy: str | None,
    layout: str,
    length: Any,
    head_groups: int | None,
    documents: Documents,
    options: Options,
    axes: tuple[str, ...],
    sizes: Axes,
    device: Any,
    needs_backward: bool,
    requested: tuple[str, ...] | None,
    shards_each: int = 1,
) -> Request:
    """Checks what needs no plan, and fills in the lengths.

    Args:
        arrays: of q, k and v.
        options: with every value checked.
        length: as the caller gave it, see ``lengths_of``.
        shards_each: how many shards lie end to end in each array.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    check_strategy(strategy, head_groups)
    shards = []
    for name, (shape, dtype) in zip("qkv", arrays, strict=True):
        if len(shape) != len(arrays[0][0]) or len(shape) not in ((4,) if documents is None else (3, 4)):
            raise ShapeError(
                f"{name}: expected [batch, shard, heads, dim], or [shard, heads, dim] with seq_info, as q, k and v "
                f"alike; got {list(shape)}"
            )
        if shards_each > 1:
            if shape[-3] % shards_each:
                raise ShapeError(
                    f"{name}: expected {shards_each} shards of one size end to end, got {shape[-3]} places; "
                    "shard_sequence makes such arrays, with padding where shards differ"
                )
            shape = (*shape[:-3], shape[-3] // shards_each, *shape[-2:])
        shards.append((shape, dtype))
    return Request(
        (*shards, sinks),
        lengths_of(length, documents, (shards[0][0][-3], shards[1][0][-3]), prod(sizes)),
        documents,
        with_longest(options, documents),
        strategy or "",
        layout,
        int(head_groups or 1),
        axes,
        sizes,
        device,
        needs_backward,
        requested,
    )


def with_longest(options: Options, documents: Documents) -> Options:
    """The options with the length of the longest document."""
    if documents is None:
        return options
    longest = max(stop - start for start, stop in pairwise(documents))
    return options._replace(max_len_q=longest, max_len_k=longest)


def lengths_of(length: Any, documents: Documents, shards: tuple[int, int], world: int) -> tuple[int, int]:
    """(queries, keys) of the whole row: as the caller says, those of the documents, or as many as the shards can hold.

    Args:
        length: an int, a pair (of q, of k), or None.
        shards: places of a shard of q, and of k.
        world: the number of ranks.

    Raises:
        SpecError: if ``length`` is no length, or differs from that of the documents.
    """
    if length is None:
        return (shards[0] * world, shards[1] * world) if documents is None else (documents[-1], documents[-1])
    pair = tuple(length) if isinstance(length, (tuple, list)) else (length, length)
    if len(pair) != 2 or not all(is_host_int(each) and each >= 0 for each in pair):
        raise SpecError(f"length={length!r}: expected the positions of the whole row, or a pair (of q, of k)")
    if documents is not None and pair != (documents[-1],) * 2:
        raise SpecError(f"length={length!r}: expected the {documents[-1]} positions of seq_info's documents")
    return pair[0], pair[1]


def documents_of(seq_info: Any, off_host: Callable[[Any], str | None]) -> Documents:
    """The offsets of a row's packed documents as plain numbers.

    Args:
        seq_info: as the caller gave it.
        off_host: says what an array of offsets is if the host cannot read it; None if it can.

    Raises:
        SpecError: for offsets that are not on the host, or that differ between queries and keys.
    """
    info = SeqInfo.coerce(seq_info)
    if info is None:
        return None
    sides = []
    for side in ("q", "k"):
        offsets = getattr(info, f"cu_seqlens_{side}")
        where = off_host(offsets)
        if where is not None:
            raise SpecError(
                f"seq_info.cu_seqlens_{side}: expected offsets on the host, because they decide what is sent where; "
                f"got {where}; SeqInfo.from_lengths takes Python ints"
            )
        offsets = np.asarray(offsets)
        check_cu_seqlens(offsets, getattr(info, f"max_len_{side}"), side=side)
        sides.append(tuple(offsets.tolist()))
    if sides[0] != sides[1]:
        raise SpecError("seq_info: expected the same documents for queries and keys in context parallelism")
    return sides[0]


@lru_cache(maxsize=64)
def _spec(
    shards: tuple[Metadata | None, ...], lengths: tuple[int, int], documents: Documents, options: Options
) -> AttentionSpec:
    def facts(each: Metadata | None, length: int | None = None) -> ArrayFacts | None:
        if each is None:
            return None
        shape = tuple(each[0]) if length is None else (*each[0][:-3], length, *each[0][-2:])
        return ArrayFacts(shape, str(each[1]).removeprefix("torch."), "")

    q, k, v = (facts(each, length) for each, length in zip(shards, (*lengths, lengths[1]), strict=False))
    assert q is not None and k is not None and v is not None
    offsets = None if documents is None else ArrayFacts((len(documents),), "int32", "")
    arrays = Arrays(q, k, v, sinks=facts(shards[3]), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return build_spec(arrays, options)


@lru_cache(maxsize=64)
def explanation(request: Request, target: Target) -> Explanation:
    """The call with its strategy chosen, and why; cached.

    Raises:
        ShapeError, DTypeError, SpecError: for arguments that describe no call.
        NoStrategyError, NoBackendError: with every reason.
    """
    spec = _spec(request.shards, request.lengths, request.documents, request.options)
    # JAX traces a forward before it knows whether there will be a backward, and both must exchange alike.
    spec = replace(spec, needs_backward=request.needs_backward or target.framework == "jax")
    constants, strategy = Constants.of(target.device), request.strategy or None
    choice = choose(spec, request.documents, request.layout, request.sizes, constants, None, strategy)
    return Explanation(choice, call_of(request._replace(strategy=choice.strategy or ""), target))


@lru_cache(maxsize=64)
def call_of(request: Request, target: Target) -> ContextCall:
    """The plan and the kernels of a call whose strategy is known; cached. Raises as ``explanation`` does."""
    spec = _spec(request.shards, request.lengths, request.documents, request.options)
    spec = replace(spec, needs_backward=request.needs_backward)
    call = context_call(
        *(spec, request.documents, request.strategy, request.layout),
        *parts_and_members(request.sizes, request.strategy),
        *(request.head_groups, target, request.requested),
    )
    layouts = call.plan.q_layout, call.plan.k_layout, call.plan.k_layout
    for name, shard, layout in zip("qkv", request.shards, layouts, strict=False):
        if shard is not None and shard[0][-3] != layout.shard:
            raise ShapeError(
                f"{name}: expected shards of {layout.shard} positions, {layout.length} over {layout.world} ranks in a "
                f"{layout.kind} layout, got {shard[0][-3]}; shard_sequence makes them, and length= is that of the "
                "whole row"
            )
    return call
