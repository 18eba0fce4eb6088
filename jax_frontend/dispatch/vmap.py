"""Runs a call under vmap: folds its mapped axes into its batch, or runs the mapped elements separately.

Each device folds its own part while the call runs, so XLA gathers neither a sharded mapped axis nor a sharded batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.call.functions import AUX, by_row
from attn_core.call.spec import AttentionSpec
from attn_core.selection import Target, refusals, row_maximum
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import local_call

_BATCH_FIRST = ("q", "k", "v", "qkv", "out", "lse", "dq", "dk", "dv", "dout", "dlse")
"""Operands whose leading axis is the batch."""
_UNBATCHED = ("sinks", "dsinks", "rng")


class MappedCall(NamedTuple):
    """A call under vmap. Its operands may have mapped axes in front, outermost first; its results have all of them."""

    call: BridgedCall
    """The call of one mapped element."""
    sizes: tuple[int, ...] = ()
    mapped: tuple[tuple[bool, ...], ...] = ()
    """For every mapped axis and every operand, whether the operand has the axis."""
    requested: tuple[str, ...] | None = None
    """The backends that the caller named, or None for automatic choice."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return self.call.names

    @property
    def inner(self) -> MappedCall:
        """The call of one element of the outermost mapped axis."""
        return self._replace(sizes=self.sizes[1:], mapped=self.mapped[1:])

    @property
    def spec(self) -> AttentionSpec:
        """The spec of the backend's call: its batch includes the mapped axes that are folded."""
        return self._wide_spec() if self.foldable() else self.inner.spec

    def _wide_spec(self) -> AttentionSpec:
        spec = self.call.spec
        if not self.sizes:
            return spec
        moving = [name for name, has in zip(self.names, map(any, zip(*self.mapped, strict=True)), strict=True) if has]
        return resized(spec, spec.batch * prod(self.sizes), spec.num_heads, spec.num_kv_heads, moving)

    def axes_in_front(self, at: int) -> tuple[int, ...]:
        """Returns the mapped axes that an operand has."""
        return tuple(axis for axis, mapped in enumerate(self.mapped) if mapped[at])

    def refusals(self) -> tuple[str, ...]:
        """Returns the reasons why the backend cannot run the call."""
        return self._refusals_of(self.spec)

    def _refusals_of(self, spec: AttentionSpec) -> tuple[str, ...]:
        why = row_maximum.reasons if self.call.direction == "row_maximum" else refusals
        return why(self.call.backend, spec, Target.here("jax", self.call.device))

    def with_mapped_axis(self, size: int, mapped: Sequence[bool]) -> MappedCall:
        """Returns the call with one more mapped axis, outside the others."""
        return self._replace(sizes=(size, *self.sizes), mapped=(tuple(mapped), *self.mapped))

    def foldable(self) -> bool:
        """Returns whether a larger batch gives the same result and the backend can run it. Else elements run alone.

        Documents, sinks and dropout's random words have no batch axis to fold into. Gradients of sinks and of a bias
        belong to one mapped element each, and a larger batch would sum them.
        """
        if not self.sizes:
            return True
        spec = self.call.spec
        unbatched = {name for at, name in enumerate(self.names) if name in _UNBATCHED and self.axes_in_front(at)}
        summed = self.call.direction == "backward" and (spec.sinks or spec.bias_gradient or bool(spec.aux_gradients))
        # Arrays that rows look up fold as the batch does. Other arrays of mapped elements differ from each other.
        rows_of = by_row(spec)
        shared = [name for number, name in enumerate(AUX) if number not in (rows_of or ())]
        counted = rows_of is None or any(
            self.axes_in_front(at) for at, name in enumerate(self.names) if name.removeprefix("d") in shared
        )
        return not (spec.packed or unbatched or summed or counted or self._refusals_of(self._wide_spec()))

    def run(self, *operands: jax.Array) -> list[jax.Array]:
        """Returns the results; traceable."""
        if not self.sizes:
            return local_call.run_anywhere(self.call, self.requested, *operands)
        if not self.foldable():
            return self._run_separately(operands)
        folded = [self._fold(at, array) for at, array in enumerate(operands)]
        results = local_call.run_anywhere(self.call._replace(spec=self.spec), self.requested, *folded)
        # [mapped * batch, ...] -> [*mapped, batch, ...]
        return [array.reshape(*self.sizes, array.shape[0] // prod(self.sizes), *array.shape[1:]) for array in results]

    def _run_separately(self, operands: Sequence[jax.Array]) -> list[jax.Array]:
        """Runs each element as its own call: a JAX backend under ``jax.vmap``, kernels one after another."""
        one, mapped = self.inner, self.mapped[0]
        if local_call.speaks_jax(self.call):
            return list(jax.vmap(one.run, [0 if moves else None for moves in mapped])(*operands))

        def run(rows: list[jax.Array]) -> list[jax.Array]:
            moving = iter(rows)
            return one.run(*(next(moving) if moves else fixed for fixed, moves in zip(operands, mapped, strict=True)))

        # A loop, because a kernel's custom call has no rule for vmap. It holds one trace of the call for all elements.
        return list(jax.lax.map(run, [array for array, moves in zip(operands, mapped, strict=True) if moves]))

    def _fold(self, at: int, array: jax.Array) -> jax.Array:
        """Returns an operand with its mapped axes folded into its batch axis; unchanged, if all batch rows share it."""
        name, has, batch = self.names[at], self.axes_in_front(at), self.call.spec.batch
        rest = array.shape[len(has) :]
        # Mapped slopes differ between elements, so they need the batch axis that the fold multiplies.
        if name == "alibi_slopes" and len(rest) == 1 and has:
            rest = (1, *rest)
        table = name.removeprefix("d")  # of a tangent, its operand
        by_batch = name in _BATCH_FIRST or (table in AUX and AUX.index(table) in (by_row(self.call.spec) or ()))
        if table == "sinks" or (table in AUX and not by_batch):
            return array
        if not by_batch and not has and (rest[0] == 1 or len(rest) == 1):
            return array
        # An operand lacks the axes along which it was not mapped. Insert them with size 1, then broadcast.
        lead = tuple(size if axis in has else 1 for axis, size in enumerate(self.sizes))
        wide = jnp.broadcast_to(array.reshape(*lead, *rest), (*self.sizes, batch, *rest[1:]))
        return wide.reshape(-1, *rest[1:])  # [*mapped, batch, ...] -> [mapped * batch, ...]


def resized(
    spec: AttentionSpec, batch: int, num_heads: int, num_kv_heads: int, with_rows: Collection[str] = ()
) -> AttentionSpec:
    """Returns the spec of a call with another batch and other heads. Axes of size 1 that broadcast stay.

    Args:
        with_rows: the operands that get a row for each row of the batch, even if all rows share one now.
    """
    changes: dict[str, Any] = {"batch": batch, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    for name, heads in (("mask", num_heads), ("bias", num_heads), ("key_ranges", num_kv_heads)):
        shape = getattr(spec, f"{name}_shape")
        if shape is not None:
            rows = batch if shape[0] != 1 or name in with_rows else 1
            changes[f"{name}_shape"] = (rows, 1 if shape[1] == 1 else heads, *shape[2:])
    if spec.alibi_shape is not None:
        *rows_of_slopes, _ = spec.alibi_shape
        if spec.paged is None and (rows_of_slopes or "alibi_slopes" in with_rows):
            rows_of_slopes = [batch]
        changes["alibi_shape"] = (*rows_of_slopes, num_heads)
    rows_of = by_row(spec) or ()
    changes["aux"] = tuple(
        entry._replace(shape=(batch, *entry.shape[1:])) if number in rows_of else entry
        for number, entry in enumerate(spec.aux)
    )
    return replace(spec, **changes)


Bind = Callable[..., list[Any]]
"""``(call, *operands) -> results``: binds the primitive that the vmap rule belongs to."""


def batch_call(
    bind: Bind, operands: Sequence[jax.Array], axes: Sequence[int | None], *, call: MappedCall, **_: object
) -> tuple[list[jax.Array], list[int]]:
    """Applies the vmap rule of the primitives in ``ops``: binds the primitive again, with one more mapped axis."""
    size, front, mapped = mapped_first(operands, axes)
    results = bind(call.with_mapped_axis(size, mapped), *front) if size else _no_results(call, front, mapped)
    return results, [0] * len(results)


def mapped_first(arrays: Sequence[jax.Array], axes: Sequence[int | None]) -> tuple[int, list[jax.Array], list[bool]]:
    """Returns (the mapped axis' size, the arrays with that axis moved to the front, whether each array has it)."""
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    front = [array if axis is None else jnp.moveaxis(array, axis, 0) for array, axis in zip(arrays, axes, strict=True)]
    return size, front, [axis is not None for axis in axes]


def _no_results(call: MappedCall, front: list[jax.Array], mapped: list[bool]) -> list[jax.Array]:
    """Returns the results of a vmap over 0 elements: arrays with a leading axis of size 0."""
    # Without elements there is nothing to run, so the types come from an abstract run of one.
    one = [jax.ShapeDtypeStruct(array.shape[moves:], array.dtype) for array, moves in zip(front, mapped, strict=True)]
    empty = (jnp.zeros((0, *shape.shape), shape.dtype) for shape in jax.eval_shape(call.run, *one))
    return [local_call.varying_as(front, array) for array in empty]
