"""Runs the tiles of a step on one device, each as a call of a backend, and merges their results; adds sinks.

Queries are ``[batch, rows, heads, dim]``, keys ``[batch, keys, kv_heads, dim]``, and the log-sum-exp
``[batch, heads, rows]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from attn_core.call.tensors import Gradients, Inputs
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.index_arrays import places_in_gathered, places_of_tile
from attn_core.context_parallel.tiles import Tile
from jax_frontend.context_parallel.exchange import KVPair, unpack_gathered
from jax_frontend.context_parallel.positions import add, put, take
from jax_frontend.dispatch import ops
from jax_frontend.dispatch.differentiable import varying_alike
from jax_frontend.dispatch.local_call import varying_as
from jax_frontend.dispatch.plan import Plan

Array = jax.Array
T = TypeVar("T")


class PartTiles(NamedTuple):
    """The tiles that one part computes in a step.

    Attributes:
        gathered: whether the tiles read gathered keys.
        part: the part's number if its tiles read other places of the gathered keys than other parts' tiles; else None.
    """

    tiles: tuple[Tile, ...]
    gathered: bool = False
    part: int | None = None

    def block(self, keys: tuple[Array, ...]) -> tuple[Array, Array]:
        """Returns (k, v). Unpacks gathered keys inside the part's branch, so that it copies only the keys it reads."""
        return unpack_gathered(keys) if self.gathered else KVPair(keys).unpack()


NO_TILES = PartTiles(())


def switch_by_part(part: Array | int, parts: Sequence[PartTiles], run: Callable[..., T], *operands: Any) -> T:
    """Runs ``run(parts[part], *operands)``, with one branch for each distinct entry of ``parts``.

    ``run`` must not contain a collective, because devices take different branches.
    """
    distinct = tuple(dict.fromkeys(parts))
    if len(distinct) == 1:
        return run(distinct[0], *operands)
    branches = [lambda *arrays, tiles=tiles: run(tiles, *arrays) for tiles in distinct]
    index = jnp.asarray([distinct.index(tiles) for tiles in parts], jnp.int32)
    return lax.switch(index[part], branches, *operands)


class TileContext(NamedTuple):
    """The call and the step that a tile belongs to.

    Attributes:
        overlaps_exchange: whether an exchange was just started; it needs a head start over the tile's kernel.
    """

    call: ContextCall
    device: str
    overlaps_exchange: bool = False

    def tile_plan(self, tile: Tile) -> Plan:
        """Returns the tile as a call of the backend that was selected for it."""
        spec, name = self.call.backend_of(tile)
        return Plan(
            spec,
            name,
            self.device,
            one_row=False,
            overlaps_exchange=self.overlaps_exchange,
            requested=self.call.requested,
        )

    def places(self, part_tiles: PartTiles, tile: Tile) -> tuple[np.ndarray, np.ndarray]:
        """Returns the places of a tile's rows and keys. Gathered blocks stay in the order of parts."""
        rows, keys = places_of_tile(tile)
        return rows, keys if part_tiles.part is None else places_in_gathered(self.call.plan, part_tiles.part)[keys]


class WholeRows(NamedTuple):
    """The results of whole rows, and the gradients of these results; dlse is None if nothing depends on lse."""

    out: Array
    lse: Array
    dout: Array
    dlse: Array | None


def attend(
    context: TileContext, part_tiles: PartTiles, q: Array, keys: tuple[Array, ...], results: tuple[Array, Array] | None
) -> tuple[Array, Array]:
    """Merges a step's tiles into the (out, lse) of earlier steps, if any; a row without keys has 0 and -inf.

    Args:
        keys: k and v of a block, or the result of ``exchange.gather``.
        results: (out, lse) of the earlier steps; None if there are none.
    """
    k, v = part_tiles.block(keys)
    # In numpy, because it is known while JAX traces: it decides what enters the program.
    touched = np.full(q.shape[1], results is not None)
    out, lse = results or _empty_results(context, q, v)
    for tile in part_tiles.tiles:
        index = rows, _ = context.places(part_tiles, tile)
        plan = context.tile_plan(tile)
        part, part_lse, _ = ops.forward(plan, _tile_inputs(plan, tile, index, q, k, v))
        if plan.spec.packed:
            part, part_lse = part[None], part_lse[None]
        part = part.astype(out.dtype)
        if touched[rows].any():  # otherwise the tile's result is the rows' first, and needs no merge
            part, part_lse = merge(take(out, rows, 1), take(lse, rows, 2), part, part_lse)
        out, lse = put(out, part, rows, 1), put(lse, part_lse, rows, 2)
        touched[rows] = True
    return out, lse


def merge(out: Array, lse: Array, other: Array, other_lse: Array) -> tuple[Array, Array]:
    """Returns the results over two sets of keys, by the formula of ``attn_core.context_parallel.on_torch.tiles``.

    Each log-sum-exp may be -inf, which means no keys. Computes in the dtype of the log-sum-exp and rounds once.
    """
    top = jnp.maximum(lse, other_lse)
    # -inf minus -inf would be NaN.
    base = jnp.where(top == -jnp.inf, 0, top)
    weight, other_weight = jnp.exp(lse - base), jnp.exp(other_lse - base)
    total = weight + other_weight
    divisor = jnp.where(total == 0, 1, total)  # both results are 0 in such a row
    # [batch, heads, rows] -> [batch, rows, heads, 1]
    by_row = [(each / divisor).swapaxes(1, 2)[..., None] for each in (weight, other_weight)]
    merged = by_row[0] * out.astype(total.dtype) + by_row[1] * other.astype(total.dtype)
    return merged.astype(out.dtype), base + jnp.log(total)


def with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Adds sinks ``[heads]`` to the softmax of whole rows: once, after all keys. Rows without keys keep 0 and -inf."""
    empty = lse == -jnp.inf
    # Any finite number will do: the results of these rows are replaced below.
    before = jnp.where(empty, 0, lse)
    after = jnp.logaddexp(before, sinks[:, None])
    share = jnp.where(empty, 0, jnp.exp(before - after))
    return out * share.swapaxes(1, 2)[..., None], jnp.where(empty, -jnp.inf, after)


def gradients(
    context: TileContext,
    of_keys: str,
    part_tiles: PartTiles,
    q: Array,
    keys: tuple[Array, ...],
    saved: WholeRows,
    dq: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Returns (dq, dk, dv) of a step's tiles, from the results of whole rows; 0 at places without a tile.

    Args:
        of_keys: "own" or "sent", see ``ContextCall.accumulator``.
        keys: as in ``attend``.
        dq: of the earlier steps, to which the tiles' dq is added. Added outside of a part's branch, the tiles' dq would
            be written with zeros around it and read again.
    """
    k, v = part_tiles.block(keys)
    totals = [
        varying_as((q, k, v), jnp.zeros(array.shape, context.call.accumulator(of)))
        for array, of in ((q, "q"), (k, of_keys), (v, of_keys))
    ]
    touched = [np.zeros(array.shape[1], bool) for array in totals]
    if dq is not None:
        totals[0], touched[0][:] = dq, True
    for tile in part_tiles.tiles:
        rows, key_places = context.places(part_tiles, tile)
        results = _tile_gradients(context.tile_plan(tile), tile, (rows, key_places), q, k, v, saved)
        for at, (part, index) in enumerate(((results.dq, rows), (results.dk, key_places), (results.dv, key_places))):
            part = part.astype(totals[at].dtype)
            write = add if touched[at][index].any() else put
            totals[at] = write(totals[at], part, index, 1)
            touched[at][index] = True
    return totals[0], totals[1], totals[2]


Index = tuple[np.ndarray, np.ndarray]
"""The places of a tile's rows and of its keys."""


def _tile_gradients(plan: Plan, tile: Tile, index: Index, q: Array, k: Array, v: Array, saved: WholeRows) -> Gradients:
    """Returns the gradients of a tile's q, k and v. By the lse of whole rows, weights are those of the whole call."""
    packed = plan.spec.packed

    def take_rows(array: Array | None, axis: int) -> Any:
        if array is None:
            return None
        array = take(array, index[0], axis)
        return array[0] if packed else array  # packed documents are one row: [1, tokens, ...] -> [tokens, ...]

    out, lse = take_rows(saved.out, 1), take_rows(saved.lse, 2)
    dout, dlse = take_rows(saved.dout, 1), take_rows(saved.dlse, 2)
    results = ops.backward(plan, _tile_inputs(plan, tile, index, q, k, v), out, lse, dout, dlse)
    return Gradients(*(array[None] for array in results[:3])) if packed else results


def _tile_inputs(plan: Plan, tile: Tile, index: Index, q: Array, k: Array, v: Array) -> Inputs:
    """Returns a tile's operands; several segments are packed documents, without the row axis."""
    rows, keys = index
    inputs = Inputs(take(q, rows, 1), take(k, keys, 1), take(v, keys, 1))
    if not plan.spec.packed:
        return inputs
    cu_q, cu_k = (jnp.asarray(side, jnp.int32) for side in tile.offsets)
    q, k, v = (array[0] for array in inputs[:3])
    return varying_alike(Inputs(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k))


def _empty_results(context: TileContext, q: Array, v: Array) -> tuple[Array, Array]:
    """Returns (out, lse) of rows before their first key."""
    batch, rows, heads, _ = q.shape
    out = jnp.zeros((batch, rows, heads, v.shape[-1]), context.call.accumulator("q"))
    lse = jnp.full((batch, heads, rows), -jnp.inf, context.call.spec.lse_dtype)
    return varying_as((q, v), out), varying_as((q, v), lse)
