"""Which axes of a call a mesh splits, and the call that is left for one device. Shapes and names alone, no arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec as P

from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from jax_frontend.dispatch.local_call import names_of
from jax_frontend.dispatch.vmap import Folded

_AXES = {
    "q": ("batch", "queries", "heads", "dim"),
    "k": ("batch", "keys", "kv_heads", "dim"),
    "v": ("batch", "keys", "kv_heads", "dim"),
    "qkv": ("batch", "queries", "three", "heads", "dim"),
    "mask": ("batch", "heads", "queries", "keys"),
    "bias": ("batch", "heads", "queries", "keys"),
    "alibi_slopes": ("batch", "heads"),
    "sinks": ("heads",),
    "cu_seqlens_q": ("documents",),
    "cu_seqlens_k": ("documents",),
    "rng": ("words",),
    "block_table": ("documents", "width"),
    "seq_lens": ("documents",),
    "out": ("batch", "queries", "heads", "dim"),
    "lse": ("batch", "heads", "queries"),
}
"""The axes of every operand; its gradient has the same. Packed arrays have no batch, and slopes may have none."""
_POOL = ("pages", "slots", "kv_heads", "dim")
"""Those of k and v where they are in pages."""
_BROADCAST = ("mask", "bias", "alibi_slopes")

Known = Sequence[tuple[str, Sequence[int], Sequence[Any]]]
"""(name, shape, PartitionSpec) of arrays whose sharding is known, those that count first in front."""


class Split(NamedTuple):
    """The mesh axes that each of a call's axes is split by, major to minor; () where it is whole."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    kv_heads: tuple[str, ...] = ()
    mapped: tuple[tuple[str, ...], ...] = ()
    """Those of the axes that vmap has put in front."""

    def over(self, axis: str) -> tuple[str, ...]:
        """What the axis of the name is split by."""
        if axis.startswith("mapped"):
            return self.mapped[int(axis.removeprefix("mapped"))]
        return getattr(self, axis, ())

    def spec(self, axes: Sequence[str]) -> P:
        """The PartitionSpec of an array with the named axes."""
        return P(*(self.over(axis) or None for axis in axes))


class Part(NamedTuple):
    """One device's part of a call."""

    whole: Folded
    local: Folded
    split: Split

    @property
    def picks_kv_heads(self) -> bool:
        """Whether the device has all kv heads, and reads those of its own query heads."""
        return bool(self.split.heads) and not self.split.kv_heads


def axes_of(call: Folded, name: str, shape: Sequence[int]) -> tuple[str, ...]:
    """The names of an operand's or a result's axes; "one" for an axis of 1 that broadcasts."""
    at = call.names.index(name) if name in call.names else None
    mapped = range(len(call.sizes)) if at is None else call.axes_in_front(at)
    own = shape[len(mapped) :]
    like = name.removeprefix("d")
    axes = _AXES[like][len(_AXES[like]) - len(own) :]
    if call.call.spec.paged is not None and like in ("k", "v"):
        axes = _POOL
    if call.call.spec.group_size == 1:
        axes = tuple("heads" if axis == "kv_heads" else axis for axis in axes)
    if like in _BROADCAST:
        axes = tuple("one" if size == 1 else axis for axis, size in zip(axes, own, strict=True))
    return (*(f"mapped{axis}" for axis in mapped), *axes)


def split_of(call: Folded, mesh: Any, known: Known) -> Split:
    """How a call is split on a mesh.

    Of several shardings of one axis the first counts. A mesh axis that does not divide an axis leaves it whole.
    """
    spec, taken = call.call.spec, set[str]()

    def first(axis: str, size: int) -> tuple[str, ...]:
        free = ([name for name in entry if name not in taken] for entry in _entries(call, known, axis))
        found = (_dividing(names, size, mesh) for names in free)
        chosen = next((axes for axes in found if axes), ())
        taken.update(chosen)
        return chosen

    mapped = tuple(first(f"mapped{axis}", size) for axis, size in enumerate(call.sizes))
    batch = first("batch", spec.batch)
    heads = first("heads", spec.num_heads) or first("kv_heads", spec.num_kv_heads)
    return Split(batch, heads, heads if spec.num_kv_heads % shards(mesh, heads) == 0 else (), mapped)


def part_of(call: Folded, mesh: Any, split: Split) -> Part:
    """What one device runs.

    Raises:
        SpecError: when the backend cannot run the part, though it can run the whole.
    """
    sizes = tuple(size // shards(mesh, over) for size, over in zip(call.sizes, split.mapped, strict=True))
    local = call._replace(call=call.call._replace(spec=_local_spec(call.call.spec, mesh, split)), sizes=sizes)
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
    if split.heads and not split.kv_heads:  # one kv head for all of a device's heads, or one for each
        kv_heads = 1 if spec.group_size % heads == 0 else heads
    changes: dict[str, Any] = {"batch": spec.batch // parts["batch"], "num_heads": heads, "num_kv_heads": kv_heads}
    for field, axes in (("mask", _AXES["mask"]), ("bias", _AXES["bias"]), ("alibi", _AXES["alibi_slopes"])):
        shape = getattr(spec, f"{field}_shape")
        if shape is not None:
            own = zip(axes[len(axes) - len(shape) :], shape, strict=True)
            changes[f"{field}_shape"] = tuple(1 if size == 1 else size // parts.get(axis, 1) for axis, size in own)
    return replace(spec, **changes)


def _entries(call: Folded, known: Known, axis: str) -> Iterator[tuple[str, ...]]:
    """The mesh axes by which the arrays have an axis sharded."""
    for name, shape, spec in known:
        entries = (*spec, *(None,) * (len(shape) - len(spec)))
        for at, entry in zip(axes_of(call, name, shape), entries, strict=True):
            if at == axis and entry is not None and entry is not P.UNCONSTRAINED:
                yield (entry,) if isinstance(entry, str) else tuple(entry)


def _dividing(axes: Sequence[str], size: int, mesh: Any) -> tuple[str, ...]:
    """The leading mesh axes, as many as divide the size."""
    kept = tuple(axes)
    while size % shards(mesh, kept):
        kept = kept[:-1]
    return kept


def shards(mesh: Any, axes: Sequence[str]) -> int:
    """Into how many parts the mesh axes split."""
    return prod(mesh.shape[axis] for axis in axes)


def result_names(call: Folded) -> tuple[str, ...]:
    """The names of the results, in order."""
    return names_of(call.call)[1]
