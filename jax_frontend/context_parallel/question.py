"""From the arguments of a context-parallel call to its plan: what is checked at trace time, and remembered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from attn_core.call.options import Options, checked
from attn_core.call.seq_info import SeqInfo, check_cu_seqlens, is_host_int
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.call import ContextCall, check_spec, context_call
from attn_core.errors import ShapeError, SpecError
from attn_core.selection import Target
from jax_frontend.context_parallel.exchange import Axes
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.dispatch import plan
from jax_frontend.dispatch.plan import Metadata


class Question(NamedTuple):
    """What is static of a context-parallel call: all that decides what its devices do.

    Attributes:
        metadata: (shape, dtype) of the whole row's arrays, as ``plan.plan`` takes them.
        documents: offsets of packed documents, or None.
        strategy, axes, head_groups: as ``context_choice`` has chosen; before that "", those of no strategy, and 1.
    """

    metadata: tuple[Metadata | None, ...]
    device: str
    options: Options
    documents: tuple[int, ...] | None
    strategy: str
    layout: str
    axes: Axes
    head_groups: int
    requested: tuple[str, ...] | None

    @property
    def packed(self) -> bool:
        """Whether the row holds documents."""
        return self.documents is not None

    def on(self, arrays: Sequence[Any]) -> Question:
        """The question of one device, whose q, k, v and sinks may have a part of the batch and of the heads."""
        q, k, v, sinks = arrays
        spec, offsets = self.spec(False)[0], self.metadata[-2:]
        mine = _whole(Inputs(q, k, v, sinks=sinks), (spec.q_len, spec.kv_len))
        return self._replace(metadata=(*mine[:-2], *offsets))

    def spec(self, needs_backward: bool) -> tuple[AttentionSpec, Target]:
        """The whole call, as on one device, and where it runs."""
        question = plan.question(self.metadata, self.device, self.options, needs_backward, False, self.requested)
        return question[0], question[1]

    def answer(self, needs_backward: bool) -> ContextCall:
        """The plan of the call and the kernels of its tiles; the same question is answered once."""
        spec, target = self.spec(needs_backward)
        where = (self.strategy, self.layout, self.axes.parts, self.axes.members, self.head_groups)
        return context_call(spec, self.documents, *where, target, self.requested)


def asked(
    place: Place,
    inputs: Inputs,
    info: SeqInfo | None,
    options: Options,
    layout: str,
    length: Any,
    requested: tuple[str, ...] | None,
) -> Question:
    """The question that a call asks, before a strategy is chosen.

    Args:
        inputs: arrays or ``jax.ShapeDtypeStruct``: shards inside ``jax.shard_map``, and outside all of them end to end.

    Raises:
        ShapeError, DTypeError, SpecError: for arguments that describe no call, and what a spread row does not have.
    """
    options = checked(options)
    if info is not None:
        options = options._replace(max_len_q=info.max_len_q, max_len_k=info.max_len_k)
    documents = documents_of(info)
    lengths = lengths_of(length, documents, shards_of(inputs, place), place.world)
    metadata, device = _whole(inputs, lengths, info), plan.device_name(inputs.q)
    question = Question(metadata, device, options, documents, "", layout, place.axes(None), 1, requested)
    check_spec(question.spec(False)[0])
    return question


def shards_of(inputs: Inputs, place: Place) -> tuple[int, int]:
    """How many places a device has for q, and for k and v.

    Raises:
        ShapeError: for arrays that are no shards.
    """
    found = {}
    for name in ("q", "k", "v"):
        shape = getattr(inputs, name).shape
        if len(shape) not in (3, 4):
            raise ShapeError(
                f"{name}: expected [batch, shard, heads, dim], or with seq_info [shard, heads, dim], got {list(shape)}"
            )
        found[name], rest = (shape[-3], 0) if place.inside else divmod(shape[-3], place.world)
        if rest:
            raise ShapeError(
                f"{name}: expected {place.world} shards of one size end to end, got {shape[-3]} places; "
                "shard_sequence makes such arrays, with padding where shards differ"
            )
    if found["k"] != found["v"]:
        raise ShapeError(f"v: expected as many places as k ({found['k']}), got {found['v']}; they are one set of keys")
    return found["q"], found["k"]


def check_shards(call: ContextCall, shards: tuple[int, int]) -> None:
    """Raises ShapeError unless every device's arrays have as many places as the layout gives it."""
    for name, layout, found in (("q", call.plan.q_layout, shards[0]), ("k", call.plan.k_layout, shards[1])):
        if layout.shard != found:
            raise ShapeError(
                f"{name}: expected shards of {layout.shard} places, for {layout.length} positions in layout="
                f"{layout.kind!r} over {layout.world} ranks, got {found}; shard_sequence makes such shards, and "
                "length= says how many positions the whole row has"
            )


def documents_of(info: SeqInfo | None) -> tuple[int, ...] | None:
    """The offsets of the whole row's documents, which every rank must know, for the plan is made of them.

    Raises:
        SpecError: for offsets that are traced or on another device, and for others of k than of q.
    """
    if info is None:
        return None
    queries, keys = (_on_host(info, side) for side in ("q", "k"))
    if not np.array_equal(queries, keys):
        raise SpecError("seq_info.cu_seqlens_k: expected those of cu_seqlens_q in context parallelism, got others")
    return tuple(queries.tolist())


def _on_host(info: SeqInfo, side: str) -> np.ndarray:
    name, offsets = f"seq_info.cu_seqlens_{side}", getattr(info, f"cu_seqlens_{side}")
    where = None
    if isinstance(offsets, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        where = "traced ones"
    elif isinstance(offsets, jax.Array) and plan.device_name(offsets) != "cpu":
        where = f"an array on {plan.device_name(offsets)}"
    if where is not None:
        raise SpecError(
            f"{name}: expected offsets on the host in context parallelism, got {where}; who computes what is planned "
            "by them, so make the SeqInfo of numpy arrays, outside of any traced function"
        )
    found = np.asarray(offsets)
    check_cu_seqlens(found, getattr(info, f"max_len_{side}"), side=side)
    return found


def lengths_of(length: Any, documents: tuple[int, ...] | None, shards: tuple[int, int], world: int) -> tuple[int, int]:
    """(queries, keys) of the whole row: what the caller says, that of the documents, or what the shards can hold.

    Raises:
        SpecError: for what is no length, or not that of the documents.
    """
    if length is None:
        return (documents[-1],) * 2 if documents is not None else (shards[0] * world, shards[1] * world)
    pair = tuple(length) if isinstance(length, (tuple, list)) else (length, length)
    if len(pair) != 2 or not all(is_host_int(each) and each >= 0 for each in pair):
        raise SpecError(f"length={length!r}: expected how many positions the whole row has, an int, or (of q, of k)")
    if documents is not None and pair != (documents[-1],) * 2:
        raise SpecError(f"length={length!r}: expected that of the documents, {documents[-1]}; it may be left out")
    return int(pair[0]), int(pair[1])


def _whole(inputs: Inputs, lengths: tuple[int, int], info: SeqInfo | None = None) -> tuple[Metadata | None, ...]:
    """(shape, dtype) of the whole row's arrays."""
    arrays = {}
    for name, length in zip("qkv", (*lengths, lengths[1]), strict=True):
        array = getattr(inputs, name)
        shape = (*array.shape[:-3], length, *array.shape[-2:])
        arrays[name] = jax.ShapeDtypeStruct(shape, array.dtype)
    if info is not None:
        arrays |= {f"cu_seqlens_{side}": getattr(info, f"cu_seqlens_{side}") for side in ("q", "k")}
    return plan.metadata(inputs._replace(**arrays))
