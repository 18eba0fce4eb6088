"""Request: a context-parallel call as both frontends describe it. Checks it, chooses its strategy and plans it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np

from attn_core.backends.shared.caches import from_records
from attn_core.call.arguments import ArrayFacts, Arrays, build_spec
from attn_core.call.kinds import is_host_int
from attn_core.call.options import Options
from attn_core.call.seq_info import SeqInfo, SeqInfoLike, check_cu_seqlens
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import Bands, ContextCall, build_call, plan_spec
from attn_core.context_parallel.choose import Choice, Explanation, check_strategy, choose, choose_layout
from attn_core.context_parallel.plan import AxisSizes
from attn_core.context_parallel.ranges import bands_of_row
from attn_core.errors import ShapeError, SpecError, shown
from attn_core.selection import Target

Metadata = tuple[tuple[int, ...], Any]
"""The shape and the dtype of an array."""
Documents = tuple[int, ...] | None
"""The offsets of the whole row's packed documents, or None."""


class Request(NamedTuple):
    """Everything that a plan depends on: all arguments of a call, but not the values of its arrays.

    Attributes:
        shards: the metadata of one rank's q, k, v and sinks; None for no sinks.
        lengths: the number of positions of the whole row, of q and of k.
        strategy, layout: "" and None to choose them. Without a layout, ``shards`` are whole rows.
        axes, sizes: the names and sizes of the mesh axes that share the row: one axis, or (outer, inner).
        device: the device of the arrays, as the framework names it.
        requested: the backends that the caller named, or None for automatic choice.
        bands: the whole mask of a call with key ranges, causal and window included.
    """

    shards: tuple[Metadata | None, ...]
    lengths: tuple[int, int]
    documents: Documents
    options: Options
    strategy: str
    layout: str | None
    head_groups: int
    axes: tuple[str, ...]
    sizes: AxisSizes
    device: Any
    needs_backward: bool
    requested: tuple[str, ...] | None
    bands: Bands = None

    @property
    def packed(self) -> bool:
        """Whether the row holds documents."""
        return self.documents is not None


def build_request(
    arrays: Sequence[Metadata],
    sinks: Metadata | None,
    *,
    strategy: str | None,
    layout: str | None,
    length: int | Sequence[int] | None,
    head_groups: int | None,
    documents: Documents,
    options: Options,
    axes: tuple[str, ...],
    sizes: AxisSizes,
    device: object,
    needs_backward: bool,
    requested: tuple[str, ...] | None,
    shards_each: int = 1,
    key_ranges: Any = None,
) -> Request:
    """Checks everything that can be checked without a plan, and computes the lengths.

    Args:
        arrays: the metadata of q, k and v; of whole rows if layout is None.
        options: checked by the caller.
        length: the caller's argument, see ``row_lengths``.
        shards_each: the number of shards that lie end to end in each array.
        key_ranges: of the whole row, in numpy.

    Raises:
        ShapeError, SpecError: naming the argument, its value and what was expected.
    """
    check_strategy(strategy, head_groups)
    shards = []
    for name, (shape, dtype) in zip("qkv", arrays, strict=True):
        # Packed rows may come without a batch axis, as in ``attention``.
        if len(shape) != len(arrays[0][0]) or len(shape) not in ((4,) if documents is None else (3, 4)):
            raise ShapeError(
                f"{name}: expected [batch, shard, heads, dim], or [shard, heads, dim] with seq_info, as q, k and v "
                f"alike; got {list(shape)}"
            )
        if shards_each > 1 and layout is not None:
            if shape[-3] % shards_each:
                raise ShapeError(
                    f"{name}: expected {shards_each} shards of one size end to end, got {shape[-3]} places; "
                    "shard_sequence makes such arrays, with padding where shards differ"
                )
            shape = (*shape[:-3], shape[-3] // shards_each, *shape[-2:])
        shards.append((shape, dtype))
    if documents is not None:
        longest = max(stop - start for start, stop in pairwise(documents))
        # The offsets are on the host, so the longest document is known exactly, whatever bound the caller passed.
        options = options._replace(max_len_q=longest, max_len_k=longest)
    q_len, k_len, v_len = (shape[-3] for shape, _ in shards)
    lengths = row_lengths(length, documents, (q_len, k_len), 1 if layout is None else prod(sizes))
    if layout is None and (q_len, k_len, v_len) != (*lengths, lengths[1]):
        raise ShapeError(f"q, k, v: expected rows of {lengths} positions with layout=None, got {q_len, k_len, v_len}")
    bands = None
    if key_ranges is not None:
        bands = bands_of_row(key_ranges, _build_spec((*shards, sinks), lengths, documents, options))
    return Request(
        (*shards, sinks),
        lengths,
        documents,
        options,
        strategy or "",
        layout,
        int(head_groups or 1),
        axes,
        sizes,
        device,
        needs_backward,
        requested,
        bands,
    )


def row_lengths(
    length: int | Sequence[int] | None, documents: Documents, shards: tuple[int, int], world: int
) -> tuple[int, int]:
    """Returns the lengths (of q, of k) of the whole row.

    Args:
        length: an int, a pair (of q, of k), or None: then the length of the documents, or the places of all shards.
        shards: the places of a shard of q, and of k.
        world: the number of ranks.

    Raises:
        SpecError: if ``length`` is no length, or differs from the length of the documents.
    """
    if length is None:
        return (shards[0] * world, shards[1] * world) if documents is None else (documents[-1], documents[-1])
    pair = tuple(length) if isinstance(length, (tuple, list)) else (length, length)
    if len(pair) != 2 or not all(is_host_int(each) and each >= 0 for each in pair):
        raise SpecError(f"length={shown(length)}: expected the positions of the whole row, or a pair (of q, of k)")
    # Zigzag cuts every document, so positions after the last document would belong to no rank.
    if documents is not None and pair != (documents[-1],) * 2:
        raise SpecError(f"length={shown(length)}: expected the {documents[-1]} positions of seq_info's documents")
    return pair[0], pair[1]


def document_offsets(seq_info: SeqInfoLike, off_host: Callable[[Any], str | None]) -> Documents:
    """Returns the offsets of a row's packed documents as plain numbers.

    Args:
        seq_info: the caller's argument.
        off_host: returns None for offsets that the host can read, and otherwise a phrase that says what they are.

    Raises:
        SpecError: for offsets that are not on the host, or that differ between queries and keys.
    """
    info = SeqInfo.coerce(seq_info)
    if info is None:
        return None
    sides = []
    for side in ("q", "k"):
        offsets = getattr(info, f"cu_seqlens_{side}")
        kind = off_host(offsets)
        if kind is not None:
            raise SpecError(
                f"seq_info.cu_seqlens_{side}: expected offsets on the host, because they decide what is sent where; "
                f"got {kind}; SeqInfo.from_lengths takes Python ints"
            )
        offsets = np.asarray(offsets)
        check_cu_seqlens(offsets, getattr(info, f"max_len_{side}"), side=side)
        sides.append(tuple(offsets.tolist()))
    if sides[0] != sides[1]:
        raise SpecError("seq_info: expected the same documents for queries and keys in context parallelism")
    return sides[0]


@lru_cache(maxsize=64)
def _build_spec(
    shards: tuple[Metadata | None, ...], lengths: tuple[int, int], documents: Documents, options: Options
) -> AttentionSpec:
    """Returns the spec of the whole call, as on one device."""

    def facts(each: Metadata | None, length: int | None = None) -> ArrayFacts | None:
        if each is None:
            return None
        # A rank sees its shard only; the spec describes the whole row.
        shape = tuple(each[0]) if length is None else (*each[0][:-3], length, *each[0][-2:])
        # str(torch.bfloat16) is "torch.bfloat16"; JAX's dtypes have no prefix.
        return ArrayFacts(shape, str(each[1]).removeprefix("torch."), "")

    q, k, v = (facts(each, length) for each, length in zip(shards, (*lengths, lengths[1]), strict=False))
    assert q is not None and k is not None and v is not None
    offsets = None if documents is None else ArrayFacts((len(documents),), "int32", "")
    arrays = Arrays(q, k, v, sinks=facts(shards[3]), cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    return build_spec(arrays, options)


@from_records(maxsize=64)
def explain_request(request: Request, target: Target) -> Explanation:
    """Chooses the strategy of a call and plans it; cached.

    Raises:
        ShapeError, DTypeError, SpecError: for arguments that describe no call.
        NoStrategyError, NoBackendError: with every reason.
    """
    spec = _build_spec(request.shards, request.lengths, request.documents, request.options)
    # JAX traces a forward before it knows whether there will be a backward, so both must choose the same strategy.
    spec = replace(spec, needs_backward=request.needs_backward or target.framework == "jax")
    how = request.sizes, None, request.strategy or None, request.bands
    launched = target.framework != "jax"  # XLA launches a JAX program itself
    choices = choose_layout(spec, request.documents, *how, launched=launched) if request.layout is None else ()
    choice = choices[0] if choices else choose(spec, request.documents, request.layout or "", *how, launched=launched)
    request = _cut(request, choice) if choices else request
    # With the strategy filled in, a call that names it finds the same plan in the cache.
    planned = plan_request(request._replace(strategy=choice.strategy or ""), target)
    return Explanation(choice, planned, target, layouts=choices)


def _cut(request: Request, choice: Choice) -> Request:
    """Returns a request for whole rows as one for their shards in a layout."""
    plan = plan_spec(choice.spec, choice.documents, choice.strategy or "", choice.layout, choice.axes, choice.bands)
    arrays = zip(request.shards[:3], (plan.q_layout, plan.k_layout, plan.k_layout), strict=True)
    shards = [((*each[0][:-3], cut.shard, *each[0][-2:]), each[1]) for each, cut in arrays if each is not None]
    return request._replace(shards=(*shards, request.shards[3]), layout=choice.layout)


@from_records(maxsize=64)
def plan_request(request: Request, target: Target) -> ContextCall:
    """Plans a call whose strategy is known; cached. Raises the same errors as ``explain_request``."""
    spec = _build_spec(request.shards, request.lengths, request.documents, request.options)
    spec = replace(spec, needs_backward=request.needs_backward)
    call = build_call(
        spec,
        request.documents,
        request.strategy,
        request.layout or "",
        request.sizes,
        request.head_groups,
        target,
        request.requested,
        request.bands,
    )
    layouts = call.plan.q_layout, call.plan.k_layout, call.plan.k_layout
    for name, shard, layout in zip("qkv", request.shards, layouts, strict=False):
        # The plan's places index shards of this size. In larger shards they would select wrong positions.
        if shard is not None and shard[0][-3] != layout.shard:
            raise ShapeError(
                f"{name}: expected shards of {layout.shard} positions, {layout.length} over {layout.world} ranks in a "
                f"{layout.kind} layout, got {shard[0][-3]}; shard_sequence makes them, and length= is that of the "
                "whole row"
            )
    return call


def describe_request(request: Request) -> str:
    """Returns the properties of a request that all ranks must share. Names of process groups differ between ranks."""
    arrays = [array for array in request.shards[:3] if array is not None]
    shapes = " ".join(f"{name} {list(shape)}" for name, (shape, _) in zip("qkv", arrays, strict=True))
    documents = "" if request.documents is None else f" documents {request.documents}"
    sinks = "" if request.shards[3] is None else " sinks"
    bands = "" if request.bands is None else f" key_ranges {[tuple(each) for each in request.bands]}"
    return (
        f"{shapes}{sinks} {arrays[0][1]}, length {request.lengths[0]}/{request.lengths[1]}, strategy "
        f"{request.strategy}, layout {request.layout}, head_groups {request.head_groups}, {request.options}"
        f"{documents}{bands}, gradients {request.needs_backward}, backend {request.requested}"
    )
