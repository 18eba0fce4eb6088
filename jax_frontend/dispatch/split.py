"""Decides which axes of a call a mesh splits, and derives one device's call. Works on shapes and names, not arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from attn_core.call.functions import AUX, by_row, reads
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from jax_frontend.dispatch.vmap import MappedCall

_AXES = {
    "q": ("batch", "queries", "heads", "dim"),
    "k": ("batch", "keys", "kv_heads", "dim"),
    "v": ("batch", "keys", "kv_heads", "dim"),
    "qkv": ("batch", "queries", "three", "heads", "dim"),
    "mask": ("batch", "heads", "queries", "keys"),
    "bias": ("batch", "heads", "queries", "keys"),
    "alibi_slopes": ("batch", "heads"),
    "key_ranges": ("batch", "kv_heads", "keys", "ranges", "ends"),
    **{name: ("first", "second", "third", "fourth") for name in AUX},
    "sinks": ("heads",),
    "cu_seqlens_q": ("documents",),
    "cu_seqlens_k": ("documents",),
    "rng": ("words",),
    "block_table": ("documents", "width"),
    "seq_lens": ("documents",),
    "kv_lengths": ("batch",),
    "kv_starts": ("batch",),
    "cache_index": ("batch",),
    "k_scales": ("pages", "slots", "kv_heads"),  # scales by page have no slots
    "v_scales": ("pages", "slots", "kv_heads"),
    "out": ("batch", "queries", "heads", "dim"),
    "lse": ("batch", "heads", "queries"),
    "row_maximum": ("batch", "heads", "queries"),
}
"""The axes of every operand and of its gradient. Packed arrays have no batch axis, and slopes may have none."""
_POOL = ("pages", "slots", "kv_heads", "dim")
"""The axes of k and v in pages."""
_BROADCAST = ("mask", "bias", "alibi_slopes", "key_ranges")

Known = Sequence[tuple[str, Sequence[int], Sequence[Any]]]
"""(name, shape, PartitionSpec) of every array with a known sharding; if two disagree, the earlier one counts."""


class Split(NamedTuple):
    """The mesh axes that split each of a call's axes, major to minor; () for a whole axis."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    mapped: tuple[tuple[str, ...], ...] = ()
    """The mesh axes of each axis that vmap has put in front."""

    def mesh_axes(self, axis: str) -> tuple[str, ...]:
        """Returns the mesh axes that split the axis of this name."""
        if axis.startswith("mapped"):
            return self.mapped[int(axis.removeprefix("mapped"))]
        return getattr(self, axis, ())

    def spec(self, axes: Sequence[str]) -> P:
        """Returns the PartitionSpec of an array with the named axes."""
        return P(*(self.mesh_axes(axis) or None for axis in axes))


class Part(NamedTuple):
    """One device's part of a call."""

    whole: MappedCall
    local: MappedCall
    split: Split

    @property
    def picks_kv_heads(self) -> bool:
        """Whether the device has all kv heads and picks those that its query heads read."""
        return bool(self.split.heads) and not self.split.kv_heads


def axes_of(call: MappedCall, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of an operand's or a result's axes; "one" for an axis of size 1 that broadcasts."""
    at = call.names.index(name) if name in call.names else None
    mapped = range(len(call.sizes)) if at is None else call.axes_in_front(at)
    own = shape[len(mapped) :]
    like = name.removeprefix("d")
    axes = _AXES[like][len(_AXES[like]) - len(own) :]
    if call.call.spec.paged is not None:  # the rows of a paged call are documents in one row of tokens
        axes = _POOL if like in ("k", "v") else tuple("documents" if axis == "batch" else axis for axis in axes)
    elif like in ("k", "v") and "cache_index" in call.names:
        axes = ("cache", *axes[1:])
    if like in AUX and AUX.index(like) in (by_row(call.call.spec) or ()):
        axes = ("batch", *axes[1:])
    # Then kv heads are query heads, and one factor splits both.
    if call.call.spec.group_size == 1:
        axes = tuple("heads" if axis == "kv_heads" else axis for axis in axes)
    if like in _BROADCAST:
        axes = tuple("one" if size == 1 else axis for axis, size in zip(axes, own, strict=True))
    return (*(f"mapped{axis}" for axis in mapped), *axes)


def split_of(call: MappedCall, mesh: Any, known: Known) -> Split:
    """Returns how a mesh splits a call.

    If arrays shard one axis differently, the first array counts. A mesh axis that does not divide an axis is not used.
    """
    spec, taken = call.call.spec, set[str]()

    # Each mesh axis can split one axis of the call only, so axes used earlier are no longer free.
    def first(axis: str, size: int) -> tuple[str, ...]:
        free = ([name for name in entry if name not in taken] for entry in _entries(call, known, axis))
        candidates = (_dividing(names, size, mesh) for names in free)
        chosen = next((axes for axes in candidates if axes), ())
        taken.update(chosen)
        return chosen

    mapped = tuple(first(f"mapped{axis}", size) for axis, size in enumerate(call.sizes))
    # A function that counts rows or heads needs all of them, unless it only looks its own row up.
    batch = () if by_row(spec) is None else first("batch", spec.batch)
    # If only k and v are split by heads, their mesh axes split the query heads as well.
    heads = () if reads(spec, "h") else first("heads", spec.num_heads) or first("kv_heads", spec.num_kv_heads)
    return Split(batch, heads, heads if spec.num_kv_heads % shards(mesh, heads) == 0 else (), mapped)


def part_of(call: MappedCall, mesh: Any, split: Split) -> Part:
    """Returns one device's part of a call.

    Raises:
        SpecError: if the backend can run the whole call but not the part.
    """
    sizes = tuple(size // shards(mesh, over) for size, over in zip(call.sizes, split.mapped, strict=True))
    local = call._replace(call=call.call._replace(spec=_local_spec(call.call.spec, mesh, split)), sizes=sizes)
    # A part has fewer heads and rows, so another rule of the backend may refuse it (a group that becomes uneven).
    reasons = local.refusals()
    if reasons:
        raise SpecError(
            f"sharding: expected a part that {call.call.backend} can run, got {local.spec} on each device of the mesh "
            f"{dict(mesh.shape)}, refused: {'; '.join(reasons)}"
        )
    return Part(call, local, split)


def _local_spec(spec: AttentionSpec, mesh: Any, split: Split) -> AttentionSpec:
    parts = {"batch": shards(mesh, split.batch), "heads": shards(mesh, split.heads)}
    heads, kv_heads = spec.num_heads // parts["heads"], spec.num_kv_heads // shards(mesh, split.kv_heads)
    if split.heads and not split.kv_heads:
        # The device's query heads share one kv head if a group is a multiple of them. Else each reads its own copy,
        # because their groups may start and end inside the device's range.
        kv_heads = 1 if spec.group_size % heads == 0 else heads
    changes: dict[str, Any] = {"batch": spec.batch // parts["batch"], "num_heads": heads, "num_kv_heads": kv_heads}
    for field, axes in (("mask", _AXES["mask"]), ("bias", _AXES["bias"]), ("alibi", _AXES["alibi_slopes"])):
        shape = getattr(spec, f"{field}_shape")
        if shape is not None:
            own = zip(axes[len(axes) - len(shape) :], shape, strict=True)
            changes[f"{field}_shape"] = tuple(1 if size == 1 else size // parts.get(axis, 1) for axis, size in own)
    rows_of = by_row(spec) or ()
    changes["aux"] = tuple(
        entry._replace(shape=(changes["batch"], *entry.shape[1:])) if number in rows_of else entry
        for number, entry in enumerate(spec.aux)
    )
    if spec.key_ranges_shape is not None:
        rows, range_heads, *rest = spec.key_ranges_shape
        local = 1 if rows == 1 else changes["batch"], 1 if range_heads == 1 else kv_heads
        changes["key_ranges_shape"] = (*local, *rest)
    return replace(spec, **changes)


def _entries(call: MappedCall, known: Known, axis: str) -> Iterator[tuple[str, ...]]:
    """Yields, for each array with this axis sharded, the mesh axes that shard it."""
    for name, shape, spec in known:
        entries = (*spec, *(None,) * (len(shape) - len(spec)))
        for at, entry in zip(axes_of(call, name, shape), entries, strict=True):
            if at == axis and entry is not None and entry is not P.UNCONSTRAINED:
                yield (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(axes: Sequence[str], size: int, mesh: Any) -> tuple[str, ...]:
    """Returns the longest prefix of the mesh axes whose number of shards divides the size."""
    # Ends at the latest without axes, because one part divides every size.
    prefix = tuple(axes)
    while size % shards(mesh, prefix):
        prefix = prefix[:-1]
    return prefix


def shards(mesh: Any, axes: Sequence[str]) -> int:
    """Returns the number of parts that the mesh axes split an axis into."""
    return prod(mesh.shape[axis] for axis in axes)
