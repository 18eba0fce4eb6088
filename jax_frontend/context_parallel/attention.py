"""context_parallel_attention for JAX arrays: one row of tokens over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from attn_core.call.hints import SharedOptions, hide_unknown, refuse_keywords
from attn_core.call.keywords import ContextParallelKeywords, No, SpreadKeywords, Yes
from attn_core.call.kinds import check_kind
from attn_core.call.options import Options, Window, check_flag, requested_names
from attn_core.call.seq_info import SeqInfoLike
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.choose import Explanation
from attn_core.context_parallel.request import Request
from attn_core.selection import override
from jax_frontend.bridge import compiled_lane
from jax_frontend.context_parallel.mesh import ArraySpecs, RankAxes, RowMesh, find_row_mesh
from jax_frontend.context_parallel.prepare import build_request, explain_request, local_request, prepare, rank_axes
from jax_frontend.context_parallel.rank import attend
from jax_frontend.context_parallel.shards import cut_layout, shard_sequence, unshard_sequence
from jax_frontend.dispatch import differentiable, plan
from jax_frontend.dispatch.local_call import vary_over, varying_axes
from jax_frontend.dispatch.partitioning import Mesh
from jax_frontend.dispatch.plan import ArrayOrShape

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]

Array = jax.Array
AxisName = str | tuple[str, str] | None


class Keywords(ContextParallelKeywords[Array], total=False):
    """The keywords of ``context_parallel_attention``, without return_lse."""

    mesh: Mesh | None
    axis_name: AxisName
    partition_spec: P | None


@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, *, return_lse: No = False, **options: Unpack[Keywords]
) -> Array: ...
@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, *, return_lse: Yes, **options: Unpack[Keywords]
) -> tuple[Array, Array]: ...
@overload
def context_parallel_attention(
    q: Array, k: Array, v: Array, *, return_lse: bool, **options: Unpack[Keywords]
) -> Array | tuple[Array, Array]: ...
@hide_unknown
def context_parallel_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = None,
    strategy: str | None = None,
    layout: str | None = None,
    length: int | Sequence[int] | None = None,
    head_groups: int | None = None,
    partition_spec: P | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Array | None = None,
    key_ranges: Array | np.ndarray | None = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    seq_info: SeqInfoLike = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """``attention`` over rows whose positions are spread over the devices of a mesh.

    Inside ``jax.shard_map`` arrays are this device's shards. Outside, they are whole rows in the order of shards, as
    ``shard_sequence`` gives them, and the call maps itself over the axes; other axes of the mesh stay as they are.

    Args:
        q: ``[batch, shard, heads, head_dim]``; of packed documents ``[shard, heads, head_dim]`` or ``[1, shard, ...]``.
            Values at places without a position do not matter; the output there is 0.
        k, v: ``[batch, shard, kv_heads, ...]``, as in ``attention``.
        mesh: a ``jax.sharding.Mesh``; None inside ``jax.shard_map``, or under ``jax.set_mesh``.
        axis_name: the mesh axis that the row is spread over; or two axes, ``(outer, inner)``: the outer one splits the
            row into parts, and devices along the inner one share a part's heads. Optional for a mesh of one axis.
        strategy: how keys and values reach the queries: ``"all_gather"``, ``"ring"`` or ``"ulysses"``; on two axes, the
            strategy of the outer one, and the inner one uses "ulysses". None chooses the fastest
            (``explain_context_parallel`` says why).
        layout: which positions a device holds: "zigzag" (even work under a causal mask), "contiguous", "striped",
            "documents" (with seq_info), or "window:W" for a causal window of W keys (even work on two ranks). Inside
            ``jax.shard_map`` None is "zigzag", the default of ``shard_sequence``. Outside it must be given, because
            whole rows may as well be in their natural order, which is "contiguous".
        length: the number of positions of the whole row, or a pair (of q, of k); None for the places of all shards.
        head_groups: the number of groups of heads; each group's exchange overlaps the computation of the group before.
        partition_spec: outside ``jax.shard_map``, how the mesh splits q, such as ``P("data", "cp", "model")``. JAX
            knows it for concrete arrays and for Explicit axes, but not for traced arrays on Auto axes. Without it,
            other axes stay automatic; then kernels raise an error for arrays that those axes split, and only JAX's own
            backend takes such arrays.
        seq_info: packed documents of the whole row, the same for q and k, with offsets on the host.
        key_ranges: of the whole row, int32 numpy ``[1, 1, kv_len, 1 or 2, 2]``; without seq_info.
        mask, bias, alibi_slopes, dropout: not supported; an error names the argument.
        return_lse: also return the log-sum-exp of the shard, ``[batch, heads, shard]``, packed ``[heads, shard]``.

    The other arguments are those of ``attention``.

    Returns:
        The output, of q's shape with value_dim channels; or ``(output, lse)``.

    Raises:
        ShapeError, DTypeError, SpecError: for invalid arguments, and for those that context parallelism lacks.
        NoBackendError: if no backend, or not the requested one, can run a tile; the message has every reason.
    """
    if unknown:
        refuse_keywords(context_parallel_attention, unknown)
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    inputs = Inputs(q, k, v, mask, bias, alibi_slopes, sinks)
    plan.check_arrays(inputs)
    row_mesh = find_row_mesh(mesh, axis_name)
    backends = requested_names(backend) or override.requested()
    layout = cut_layout(row_mesh, layout)
    how = {
        "strategy": strategy,
        "layout": layout,
        "length": length,
        "head_groups": head_groups,
        "key_ranges": key_ranges,
    }
    request = build_request(row_mesh, inputs, options, seq_info, backends, **how)
    # Chosen from whole rows, before each device builds its own request: all devices must use one strategy.
    request = request._replace(strategy=explain_request(request).choice.strategy or "")
    if row_mesh.inside:
        return attend_shards(request, q, k, v, sinks)
    specs = row_mesh.array_specs(partition_spec, q, k, v)
    arrays = (row_mesh.reshard(array, specs.arrays) for array in (q, k, v))
    return _attend_over_mesh(request, row_mesh, specs, *arrays, row_mesh.reshard(sinks, P(specs.heads)))


_shared = SharedOptions(context_parallel_attention, SpreadKeywords.__optional_keys__)


@_shared
def explain_context_parallel(
    q: ArrayOrShape,
    k: ArrayOrShape,
    v: ArrayOrShape,
    *,
    mesh: Mesh | None = None,
    axis_name: AxisName = None,
    layout: str | None = "zigzag",
    partition_spec: P | None = None,
    return_lse: bool = False,
    needs_backward: bool | None = None,
    **options: Unpack[SpreadKeywords[ArrayOrShape]],
) -> Explanation:
    """Returns how ``context_parallel_attention`` runs a call with the same arguments, and why. Runs nothing.

    With ``layout=None``, q, k and v are whole rows, whose values do not matter, and we choose a layout:
    ``explanation.choice.layout``, to be passed to ``shard_sequence`` and to the call.
    Takes arrays or ``jax.ShapeDtypeStruct``; ``needs_backward=True`` explains a call in training. The text names each
    backend's lane, and the reasons if Python launches its kernels.
    """
    said = _shared.complete(explain_context_parallel, {**options})
    plain = Options.of(said | {"return_lse": return_lse})
    tables = (said[name] for name in ("mask", "bias", "alibi_slopes", "sinks"))
    inputs = Inputs(q, k, v, *tables)
    plan.check_arrays(inputs, shapes_only=True)
    row_mesh = find_row_mesh(mesh, axis_name)
    backends = requested_names(said["backend"]) or override.requested()
    check_kind("layout", layout, (str, type(None)), "the name of a layout, or None")
    how = {name: said[name] for name in ("strategy", "length", "head_groups", "key_ranges")}
    request = build_request(row_mesh, inputs, plain, said["seq_info"], backends, layout=layout, **how)
    if needs_backward is not None:
        check_flag("needs_backward", needs_backward)
    explanation = explain_request(request._replace(needs_backward=bool(needs_backward)))
    return compiled_lane.with_step_reasons(explanation)


# Jitted, because an eager jax.shard_map would run operation by operation.
@partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_over_mesh(
    request: Request, row_mesh: RowMesh, specs: ArraySpecs, q: Array, k: Array, v: Array, sinks: Array | None
) -> Array | tuple[Array, Array]:
    """Maps ``attend_shards`` over the mesh."""
    mapped = jax.shard_map(
        partial(attend_shards, request),
        mesh=row_mesh.mesh,
        in_specs=(specs.arrays,) * 3 + (P(specs.heads),),
        out_specs=(specs.arrays, specs.lse(request.packed)) if request.options.return_lse else specs.arrays,
        axis_names=specs.manual,
    )
    return mapped(q, k, v, sinks)


def _vary_over_ranks(axes: RankAxes, *arrays: Array | None) -> tuple[Array | None, ...]:
    """Types the arrays (or None) as varying over the ranks, and over every other axis that one of them varies over.

    Results differ between ranks. With these types, JAX sums the gradient of an array that is equal on every device over
    the devices, as it does for its own operations.
    """
    ranks = [lax.axis_index(name) for name in axes.names]  # typed as varying, if JAX checks types
    every = varying_axes(*ranks, *(array for array in arrays if array is not None))
    return tuple(None if array is None else vary_over(every, array) for array in arrays)


@partial(jax.jit, static_argnums=0, inline=True)
def attend_shards(request: Request, q: Array, k: Array, v: Array, sinks: Array | None) -> Array | tuple[Array, Array]:
    """Returns the shard of the output, or ``(out, lse)`` of it.

    Args:
        q, k, v: ``[batch, shard, heads, dim]``; of packed documents ``[shard, heads, dim]`` or ``[1, shard, ...]``.
        sinks: ``[heads]``, the same on every device, or None.
    """
    request = local_request(request, q, k, v, sinks)
    without_rows = q.ndim == 3
    if without_rows:  # [shard, heads, dim] -> [1, shard, heads, dim]
        q, k, v = (array[None] for array in (q, k, v))
    if sinks is not None:  # cast before they vary, so that JAX sums their gradient over devices in this dtype
        sinks = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    results = attend(
        prepare, request, request.options.return_lse, *_vary_over_ranks(rank_axes(request), q, k, v, sinks)
    )
    out, lse = results if request.options.return_lse else (results, None)
    out = out[0] if without_rows else out
    if lse is None:
        return out
    if sinks is not None:
        lse = differentiable.fill_with_sinks(lse, sinks, prepare(request, needs_backward=False).query_count)
    return out, lse[0] if request.packed else lse
