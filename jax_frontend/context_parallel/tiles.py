"""Runs the tiles of a step on one device, each a call of a backend, and merges their results; and sinks.

Queries are ``[batch, rows, heads, dim]``, keys ``[batch, keys, kv_heads, dim]``, and the log-sum-exp
``[batch, heads, rows]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.tensors import Gradients, Inputs
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.places import places_in_gathered, places_of_tile
from attn_core.context_parallel.tiles import Tile
from jax_frontend.context_parallel.exchange import Pair, unpack_gathered
from jax_frontend.context_parallel.places import put, taken
from jax_frontend.dispatch import ops
from jax_frontend.dispatch.differentiable import varying_alike
from jax_frontend.dispatch.local_call import varying_as
from jax_frontend.dispatch.plan import Plan

Array = jax.Array
Tiles = tuple[Tile, ...]


class PartTiles(NamedTuple):
    """The tiles that one part computes in a step.

    Attributes:
        gathered: whether the tiles read gathered keys.
        of_part: the part's number if the tiles depend on it, else None.
    """

    tiles: Tiles
    gathered: bool = False
    of_part: int | None = None

    def block(self, keys: tuple[Array, ...]) -> tuple[Array, Array]:
        """(k, v). Takes gathered keys apart here, inside the branch, so that a part copies only the keys it reads."""
        return unpack_gathered(keys) if self.gathered else Pair(keys).both


class TileContext(NamedTuple):
    """The call that a tile belongs to.

    Attributes:
        overlaps_exchange: whether an exchange was just started that the tile's kernel must give a head start.
    """

    call: ContextCall
    device: str
    overlaps_exchange: bool = False

    def accumulator(self, of: str) -> Any:
        """The dtype in which results are added up: of queries ("q"), of the own block's keys ("own"), or of keys whose
        gradients go to another part ("sent").

        The inputs' dtype; the log-sum-exp's if some part of the call adds up in a wider dtype.
        """
        return jnp.dtype(self.call.accumulator(of))

    def planned(self, tile: Tile) -> Plan:
        """The tile as a call of the kernel that was chosen for it."""
        spec, name = self.call.backend_of(tile)
        return Plan(
            spec,
            name,
            self.device,
            one_row=False,
            overlaps_exchange=self.overlaps_exchange,
            requested=self.call.requested,
        )

    def places(self, mine: PartTiles, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """The places of a tile's rows and keys. Gathered blocks stay in the order of parts."""
        rows, keys = places_of_tile(tile)
        return rows, keys if mine.of_part is None else places_in_gathered(self.call.plan, mine.of_part)[keys]


class WholeRows(NamedTuple):
    """Whole rows' results and their gradients; dlse is None if nothing depends on the log-sum-exp."""

    out: Array
    lse: Array
    dout: Array
    dlse: Array | None


def attend(
    context: TileContext, mine: PartTiles, q: Array, keys: tuple[Array, ...], so_far: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """(out, lse) of the rows over the keys of ``so_far`` and of some tiles; a row without keys has 0 and -inf.

    ``keys`` are k and v of a block, or the result of ``exchange.gather``. Rows that no tile has touched yet take a
    tile's result without a merge.
    """
    k, v = mine.block(keys)
    touched = np.full(q.shape[1], so_far is not None)
    out, lse = so_far or _nothing(context, q, v)
    for tile in mine.tiles:
        index = rows, _ = context.places(mine, tile)
        plan = context.planned(tile)
        part, part_lse = ops.forward(plan, _inputs(plan, tile, index, q, k, v))
        if plan.spec.packed:
            part, part_lse = part[None], part_lse[None]
        part = part.astype(out.dtype)
        if touched[rows].any():
            part, part_lse = merge(taken(out, rows, 1), taken(lse, rows, 2), part, part_lse)
        out, lse = put(out, part, rows, 1), put(lse, part_lse, rows, 2)
        touched[rows] = True
    return out, lse


def merge(out: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """Merges attention to two sets of keys (Milakov, Gimelshein, 2018, arXiv:1805.02867, for two parts).

    A log-sum-exp of -inf means no keys; both may be -inf. Computes in the dtype of the log-sum-exp and rounds once.
    """
    top = jnp.maximum(lse, other_lse)
    base = jnp.where(top == -jnp.inf, 0, top)
    weight, other_weight = jnp.exp(lse - base), jnp.exp(other_lse - base)
    total = weight + other_weight
    share = jnp.where(total == 0, 0, other_weight / jnp.where(total == 0, 1, total))
    share = share.swapaxes(1, 2)[..., None]  # [batch, heads, rows] -> [batch, rows, heads, 1]
    before, further = out.astype(share.dtype), other.astype(share.dtype)
    return (before + share * (further - before)).astype(out.dtype), base + jnp.log(total)


def with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """(out, lse) of whole rows with their sinks ``[heads]``; a row that sees no key keeps its 0 and -inf.

    Sinks join the softmax once, after all keys of the row.
    """
    empty = lse == -jnp.inf
    before = jnp.where(empty, 0, lse)
    after = jnp.logaddexp(before, sinks[:, None])
    share = jnp.where(empty, 0, jnp.exp(before - after))
    return out * share.swapaxes(1, 2)[..., None], jnp.where(empty, -jnp.inf, after)


def sink_gradient(sinks: Array, saved: WholeRows) -> Array:
    """``[heads]``: the sum of ``exp(sink - lse) * (dlse - sum(dout * out))`` over the rows that see a key."""
    shift = -(saved.dout.astype(sinks.dtype) * saved.out.astype(sinks.dtype)).sum(-1).swapaxes(1, 2)
    if saved.dlse is not None:
        shift = shift + saved.dlse.astype(sinks.dtype)
    empty = saved.lse == -jnp.inf
    weights = jnp.exp(sinks[:, None] - jnp.where(empty, 0, saved.lse))
    return jnp.where(empty, 0, weights * shift).sum((0, 2))


def gradients(
    context: TileContext, of_keys: str, mine: PartTiles, q: Array, keys: tuple[Array, ...], saved: WholeRows
) -> tuple[Array, Array, Array]:
    """(dq, dk, dv) of some tiles, from the output and log-sum-exp of whole rows; 0 at places without a tile.

    ``of_keys`` is "own" or "sent", see ``TileContext.accumulator``; keys as in ``attend``.
    """
    k, v = mine.block(keys)
    totals = [
        varying_as((q, k, v), jnp.zeros(array.shape, context.accumulator(of)))
        for array, of in ((q, "q"), (k, of_keys), (v, of_keys))
    ]
    touched = [np.zeros(array.shape[1], bool) for array in totals]
    for tile in mine.tiles:
        rows, of_key = context.places(mine, tile)
        results = _tile_gradients(context.planned(tile), tile, (rows, of_key), q, k, v, saved)
        for at, (part, index) in enumerate(((results.dq, rows), (results.dk, of_key), (results.dv, of_key))):
            part = part.astype(totals[at].dtype)
            if touched[at][index].any():
                part = taken(totals[at], index, 1) + part
            totals[at] = put(totals[at], part, index, 1)
            touched[at][index] = True
    dq, dk, dv = totals
    return dq, dk, dv


Index = tuple[np.ndarray, np.ndarray]
"""The places of a tile's rows and of its keys."""


def _tile_gradients(plan: Plan, tile: Tile, index: Index, q: Array, k: Array, v: Array, saved: WholeRows) -> Gradients:
    packed = plan.spec.packed

    def cut(array: Any, axis: int) -> Any:
        if array is None:
            return None
        array = taken(array, index[0], axis)
        return array[0] if packed else array  # packed documents are one row: [1, tokens, ...] -> [tokens, ...]

    out, lse, dout, dlse = cut(saved.out, 1), cut(saved.lse, 2), cut(saved.dout, 1), cut(saved.dlse, 2)
    results = ops.backward(plan, _inputs(plan, tile, index, q, k, v), out, lse, dout, dlse)
    return Gradients(*(array[None] for array in results[:3])) if packed else results


def _inputs(plan: Plan, tile: Tile, index: Index, q: Array, k: Array, v: Array) -> Inputs:
    """The tile's rows and keys; several segments as packed documents, without the row axis."""
    rows, keys = index
    inputs = Inputs(taken(q, rows, 1), taken(k, keys, 1), taken(v, keys, 1))
    if not plan.spec.packed:
        return inputs
    cu_q, cu_k = (jnp.asarray(side, jnp.int32) for side in tile.offsets)
    q, k, v = (array[0] for array in inputs[:3])
    return varying_alike(Inputs(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))


def _nothing(context: TileContext, q: Array, v: Array) -> tuple[Array, Array]:
    """(out, lse) of rows before their first key."""
    batch, rows, heads, _ = q.shape
    out = jnp.zeros((batch, rows, heads, v.shape[-1]), context.accumulator("q"))
    lse = jnp.full((batch, heads, rows), -jnp.inf, context.call.spec.lse_dtype)
    return varying_as((q, v), out), varying_as((q, v), lse)
