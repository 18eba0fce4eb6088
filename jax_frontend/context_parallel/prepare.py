"""Prepares a call at trace time: builds its request, chooses and plans it, and builds what a device runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from attn_core.call.options import Options, check_options
from attn_core.call.seq_info import SeqInfoLike
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import request as requests
from attn_core.context_parallel.call import ContextCall, check_supported
from attn_core.context_parallel.choose import Explanation
from attn_core.context_parallel.plan import Step
from attn_core.context_parallel.request import Metadata, Request
from attn_core.selection import Target
from jax_frontend.context_parallel import exchange, tiles
from jax_frontend.context_parallel.mesh import RankAxes, RowMesh
from jax_frontend.context_parallel.positions import BlockOrder, block_order
from jax_frontend.dispatch import plan

Array = jax.Array


class RankPlan(NamedTuple):
    """What one device does in a call. One program runs on all devices, so it holds the tiles of every part."""

    call: ContextCall
    axes: RankAxes
    device: str

    def tile_context(self, step: Step | None, *, backward: bool = False) -> tiles.TileContext:
        """Returns the context of a step's tiles.

        No exchange overlaps the last forward step, or a step on gathered keys. Any other step may overlap an exchange,
        and so may all steps if there are several groups of heads.
        """
        steps = self.call.plan.steps
        sends = len(steps) > 1 and step is not None and not step.gathered
        overlaps = self.call.head_groups > 1 or (sends and (backward or step is not steps[-1]))
        return tiles.TileContext(self.call, self.device, overlaps)

    @property
    def query_count(self) -> Array:
        """The number of places of this device's shard of q that hold a position. These places come first."""
        counts = self.call.plan.q_layout.position_counts
        # A table, because the rank is known only when the program runs.
        return jnp.asarray(counts, jnp.int32)[self.axes.rank]

    @property
    def _q_order(self) -> BlockOrder:
        return block_order(self.call.plan.q_layout, self.call.plan.q_blocks)

    @property
    def _k_order(self) -> BlockOrder:
        return block_order(self.call.plan.k_layout, self.call.plan.k_blocks)

    def first_head(self, group: int) -> Array:
        """Returns the first query head of a group that this device computes."""
        heads, _ = self.call.heads
        return jnp.asarray((group * self.axes.members + self.axes.member) * heads, jnp.int32)

    def own_sinks(self, sinks: Array, group: int) -> Array:
        """Returns the sinks of a group's heads that this device computes, in the dtype of the log-sum-exp."""
        own = lax.dynamic_slice_in_dim(sinks, self.first_head(group), self.call.heads[0])
        return own.astype(self.call.spec.lse_dtype)

    def block_of_queries(self, shard: Array) -> Array:
        """Returns ``[batch, shard, all heads, ...]`` as this part's block with this device's heads, in order."""
        return self._q_order.to_block(exchange.heads_to_positions(self.axes, shard), self.axes.part)

    def shard_of_queries(self, block: Array) -> Array:
        """The inverse of ``block_of_queries``."""
        return exchange.positions_to_heads(self.axes, self._q_order.to_shards(block, self.axes.part))

    def block_of_keys(self, shard: Array) -> Array:
        """Returns ``[batch, shard, all kv heads, ...]`` as this part's block, in order, with copies of kv heads."""
        copied = shard if self.call.repeats == 1 else jnp.repeat(shard, self.call.repeats, axis=2)
        return self._k_order.to_block(exchange.heads_to_positions(self.axes, copied), self.axes.part)

    def shard_of_keys(self, block: Array, dtype: DTypeLike) -> Array:
        """Returns the gradient of the shard from the gradient of this part's block; adds up copies of kv heads."""
        block = self._k_order.to_shards(block, self.axes.part)
        repeats = self.call.repeats
        # Copies of a kv head are added up after the exchange, so they stay in the dtype of sums until then.
        shard = exchange.positions_to_heads(self.axes, block.astype(dtype) if repeats == 1 else block)
        if repeats == 1:
            return shard
        # [batch, shard, heads * copies, dim] -> [batch, shard, heads, dim]
        # No -1: JAX cannot infer a size in an array without elements, of a row without positions.
        copies = shard.reshape(*shard.shape[:2], shard.shape[2] // repeats, repeats, shard.shape[3])
        return copies.astype(self.call.spec.lse_dtype).sum(3).astype(dtype)


def prepare(request: Request, *, needs_backward: bool) -> RankPlan:
    """Plans a request whose strategy is known; core caches the plan."""
    call = requests.plan_request(request._replace(needs_backward=needs_backward), Target.here("jax", request.device))
    return RankPlan(call, rank_axes(request), request.device)


def rank_axes(request: Request) -> RankAxes:
    """Returns the axes of a request whose strategy is known."""
    return RankAxes.of(request.axes, request.sizes, request.strategy)


def explain_request(request: Request) -> Explanation:
    """Chooses the strategy of a request and plans it; core caches the result."""
    return requests.explain_request(request, Target.here("jax", request.device))


def build_request(
    row_mesh: RowMesh,
    inputs: Inputs,
    options: Options,
    seq_info: SeqInfoLike,
    backends: tuple[str, ...] | None,
    **how: Any,
) -> Request:
    """Returns the request of a call, without a backward.

    Args:
        inputs: arrays or ``jax.ShapeDtypeStruct``: shards inside ``jax.shard_map``, and outside all shards end to end.
        how: the caller's strategy, layout, length and head_groups.

    Raises:
        ShapeError, DTypeError, SpecError: for invalid arguments, and for those that context parallelism lacks.
    """
    check_supported(inputs.mask, inputs.bias, inputs.alibi_slopes, options.dropout)
    q, k, v = (_metadata(array) for array in inputs[:3])
    return requests.build_request(
        (q, k, v),
        None if inputs.sinks is None else _metadata(inputs.sinks),
        **how,
        documents=document_offsets(seq_info),
        options=check_options(options),
        axes=row_mesh.names,
        sizes=row_mesh.sizes,
        device=plan.device_name(inputs.q),
        # JAX's arrays do not show it. The derivative's forward plans again, with a backward.
        needs_backward=False,
        requested=backends,
        shards_each=1 if row_mesh.inside else row_mesh.world,
    )


def local_request(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Request:
    """Returns the request of one device, whose arrays may have a part of the batch and of the heads."""
    return request._replace(shards=tuple(None if array is None else _metadata(array) for array in (q, k, v, sinks)))


def document_offsets(seq_info: SeqInfoLike) -> requests.Documents:
    """Returns the offsets of a row's packed documents as plain numbers; see ``attn_core.context_parallel.request``."""
    return requests.document_offsets(seq_info, _off_host)


def _off_host(offsets: object) -> str | None:
    if isinstance(offsets, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "traced ones"
    on_device = isinstance(offsets, jax.Array) and plan.device_name(offsets) != "cpu"
    return f"an array on {plan.device_name(offsets)}" if on_device else None


def _metadata(array: Array) -> Metadata:
    return tuple(array.shape), np.dtype(array.dtype)
