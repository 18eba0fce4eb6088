"""Turns named arrays into arrays ``[batch, length, heads, dim]`` and the output back into a named array."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attn_core.errors import ShapeError, SpecError, shown

Array = jax.Array
Names = tuple[str, ...]


class Axes(NamedTuple):
    """The names of a call's axes, and the sizes of all but ``depth`` and ``values``."""

    batch: Names
    queries: str
    keys: str
    depth: str
    """Of the dot product."""
    heads: Names
    """Of keys and values: one axis, or none."""
    groups: Names
    """Of queries only."""
    values: Names
    """Of value only."""
    sizes: dict[str, int]

    @property
    def scores(self) -> tuple[Names, ...]:
        """The axes of a mask: batch, heads, queries and keys."""
        return self.batch, (*self.heads, *self.groups), (self.queries,), (self.keys,)


def axis_name(argument: str, axis: Any) -> str:
    """Returns the name of an axis, which may be the axis or its name."""
    name = getattr(axis, "name", axis)
    if not isinstance(name, str):
        raise SpecError(f"{argument}={shown(axis)}: expected one axis or its name")
    return name


def sizes_of(argument: str, named: Any) -> dict[str, int]:
    """Returns the size of each axis of a named array."""
    if not hasattr(named, "axes") or not hasattr(named, "array"):
        raise TypeError(f"{argument}: expected a named array of haliax, got {type(named).__name__}")
    return {axis.name: axis.size for axis in named.axes}


def axes_of(names: Names, query: Any, key: Any, value: Any, mask: Any) -> Axes:
    """Returns the axes of a call.

    Of the axes that query, key and value share, the last one is the heads, unless it tells apart the rows of the mask.

    Raises:
        ShapeError, SpecError: naming the argument and the axis.
    """
    queries, keys, depth = names
    of_q, of_k, of_v = sizes_of("query", query), sizes_of("key", key), sizes_of("value", value)
    if queries == keys:
        raise SpecError(f"KPos={keys}: expected another name than QPos")
    for argument, sizes, wanted in (
        ("query", of_q, (queries, depth)),
        ("key", of_k, (keys, depth)),
        ("value", of_v, (keys,)),
    ):
        if any(name not in sizes for name in wanted):
            raise ShapeError(f"{argument}: expected the axes {', '.join(wanted)}, got {', '.join(sizes)}")
    shared = tuple(name for name in of_q if name in of_k and name != depth)
    groups = tuple(name for name in of_q if name not in (*shared, queries, depth))
    values = tuple(name for name in of_v if name not in (*shared, keys))
    for name in of_k:
        if name not in (keys, depth) and (name not in shared or name not in of_v):
            raise ShapeError(f"key: expected its axis {name} in query and in value")
    for name in (*groups, queries):
        if name in values:
            raise ShapeError(f"value: expected no axis {name} of query that key does not have")
    sizes = {name: of_q[name] for name in (*shared, *groups, queries)} | {keys: of_k[keys]}
    checked = [("key", of_k, name, sizes[name]) for name in shared] + [("key", of_k, depth, of_q[depth])]
    for argument, own, name, size in (*checked, *(("value", of_v, name, sizes[name]) for name in (*shared, keys))):
        if own[name] != size:
            raise ShapeError(f"{argument}: expected size {size} of the axis {name}, got {own[name]}")
    rows = _axes_of_rows(mask)
    heads = tuple(name for name in shared if name not in rows)[-1:]
    batch = tuple(name for name in shared if name not in heads)
    return Axes(batch, queries, keys, depth, heads, groups, values, sizes)


def _axes_of_rows(mask: Any) -> set[str]:
    """Returns the axes of a mask's segment ids and offset, which exist once for each row of a batch."""
    ids, offset = getattr(mask, "segment_ids", None), getattr(mask, "causal_offset", None)
    arrays = [*(ids if isinstance(ids, tuple) else (ids,)), offset]
    return {axis.name for array in arrays for axis in getattr(array, "axes", ())}


def grouped(argument: str, named: Any, groups: tuple[Names, ...], axes: Axes, *, broadcast: bool = True) -> Array:
    """Returns a named array with one axis for each group of names, in this order.

    Args:
        broadcast: whether a group without any axis of the array is repeated; else it has size 1.

    Raises:
        ShapeError: if the array has an axis that is in no group, or one of another size.
    """
    own = sizes_of(argument, named)
    order = [name for group in groups for name in group if name in own]
    for name, size in own.items():
        if name not in order:
            raise ShapeError(f"{argument}: expected no axis {name}, got axes {', '.join(own)}")
        if size != axes.sizes.get(name, size):
            raise ShapeError(f"{argument}: expected size {axes.sizes[name]} of the axis {name}, got {size}")
    names = list(own)
    array = jnp.transpose(named.array, [names.index(name) for name in order])
    full, shape = [], []
    for group in groups:
        repeats = broadcast or any(name in own for name in group)
        sizes = [own.get(name, axes.sizes.get(name, 1)) if repeats else 1 for name in group]
        full += sizes
        shape.append(math.prod(sizes))
    ones = [own.get(name, 1) for group in groups for name in group]
    return jnp.broadcast_to(array.reshape(ones), full).reshape(shape)


def named_like(query: Any, value: Any, out: Array, axes: Axes) -> Any:
    """Returns the output ``[batch, length, heads, dim]`` with the axes of query, value's own in the place of depth."""
    by_name = {axis.name: axis for axis in query.axes if axis.name != axes.depth}
    own = [axis for axis in value.axes if axis.name in axes.values]
    order = [*axes.batch, axes.queries, *axes.heads, *axes.groups]
    array = out.reshape([axes.sizes[name] for name in order] + [axis.size for axis in own])
    at: list[int] = []
    result: list[Any] = []
    for axis in query.axes:
        if axis.name == axes.depth:
            at += range(len(order), len(order) + len(own))
            result += own
        else:
            at.append(order.index(axis.name))
            result.append(by_name[axis.name])
    return type(query)(jnp.transpose(array, at), tuple(result))
