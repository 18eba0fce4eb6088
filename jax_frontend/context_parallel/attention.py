"""context_parallel_attention for JAX arrays: one row of tokens over several devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from attn_core.call.options import Options, requested_names
from attn_core.context_parallel.cost.choose import Explanation
from attn_core.context_parallel.request import Request
from attn_core.selection import override
from jax_frontend.attention import Window
from jax_frontend.context_parallel import mesh as context_mesh
from jax_frontend.context_parallel.differentiable import on_shards
from jax_frontend.context_parallel.mesh import Place, Rows
from jax_frontend.context_parallel.prepare import explanation, requested
from jax_frontend.context_parallel.shards import shard_sequence, unshard_sequence
from jax_frontend.dispatch import plan

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]

Array = jax.Array
AxisName = str | tuple[str, str] | None


def context_parallel_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    mesh: Any = None,
    axis_name: AxisName = None,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | Sequence[int] | None = None,
    head_groups: int | None = None,
    partition_spec: P | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Array | None = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Any:
    """``attention`` of rows that are spread over the devices of a mesh by position.

    Inside ``jax.shard_map`` arrays are this device's shards. Outside, they are whole rows in the order of shards, as
    ``shard_sequence`` gives them, and the call maps itself over the axes; other axes of the mesh stay as they are.

    Args:
        q: ``[batch, shard, heads, head_dim]``; of packed documents ``[shard, heads, head_dim]`` or ``[1, shard, ...]``.
            What lies in places that hold no position reaches nothing, and their output is 0.
        k, v: ``[batch, shard, kv_heads, ...]``, as ``attention`` has them.
        mesh: a ``jax.sharding.Mesh``; None inside ``jax.shard_map``, or under ``jax.set_mesh``.
        axis_name: the mesh axis that the row is spread over, or two, ``(outer, inner)``: parts of the row, and in each
            the devices that share its heads. May be left out for a mesh of one axis.
        strategy: how devices exchange keys and values: "all_gather", everybody gets all; "ring", they travel around;
            "ulysses", heads are exchanged for positions. Of two axes it is the outer one's, the inner one is "ulysses".
            None chooses by a cost model (``explain_context_parallel`` tells why).
        layout: which positions a device holds: "zigzag" (even work under a causal mask), "contiguous" or "striped".
        length: positions of the whole row, or of q and of k; what the shards can hold where it is None.
        head_groups: in how many groups the heads are computed, one's exchange during another's computation.
        partition_spec: outside ``jax.shard_map``, how the mesh splits q, such as ``P("data", "cp", "model")``. JAX
            knows it of arrays and of Explicit axes. Of traced arrays on Auto axes it does not: where it is not given,
            other axes stay automatic, and a kernel refuses arrays that they split, which JAX's own backend takes.
        seq_info: packed documents of the whole row, the same for q and k, with offsets on the host.
        mask, bias, alibi_slopes, dropout: refused.
        return_lse: also return the log-sum-exp of the shard, ``[batch, heads, shard]``, packed ``[heads, shard]``.

    The other arguments are those of ``attention``.

    Returns:
        The output, of q's shape with value_dim channels; or ``(output, lse)``.

    Raises:
        ShapeError, DTypeError, SpecError: for arguments that describe no call, and what a spread row does not have.
        NoBackendError: when no backend, or not the one asked for, can run a tile of it; the message has every reason.
    """
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    inputs = plan.checked_arrays((q, k, v, mask, bias, alibi_slopes, sinks))
    place = context_mesh.found(mesh, axis_name)
    backends = requested_names(backend) or override.requested()
    request = requested(place, inputs, options, seq_info, length, strategy, layout, head_groups, backends)
    request = request._replace(strategy=explanation(request).choice.strategy or "")
    if place.inside:
        return on_shards(request, q, k, v, sinks)
    rows = place.rows(partition_spec, q, k, v)
    arrays = (place.typed(array, rows.arrays) for array in (q, k, v))
    return _over_mesh(request, place, rows, *arrays, place.typed(sinks, P(rows.heads)))


def explain_context_parallel(
    q: Any,
    k: Any,
    v: Any,
    *,
    mesh: Any = None,
    axis_name: AxisName = None,
    strategy: str | None = None,
    layout: str = "zigzag",
    length: int | Sequence[int] | None = None,
    head_groups: int | None = None,
    partition_spec: P | None = None,
    causal: bool = False,
    alignment: str = "bottom_right",
    window: Window = None,
    softcap: float | None = None,
    scale: float | None = None,
    mask: Any = None,
    bias: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    seq_info: Any = None,
    dropout: float = 0.0,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    needs_backward: bool | None = None,
) -> Explanation:
    """How ``context_parallel_attention`` runs with the same arguments, and why. Runs nothing.

    Takes arrays or ``jax.ShapeDtypeStruct``; ``needs_backward=True`` asks about training.
    """
    options = Options(causal, alignment, window, softcap, scale, None, None, dropout, deterministic, return_lse)
    inputs = plan.checked_arrays((q, k, v, mask, bias, alibi_slopes, sinks), shapes_only=True)
    place = context_mesh.found(mesh, axis_name)
    backends = requested_names(backend) or override.requested()
    request = requested(place, inputs, options, seq_info, length, strategy, layout, head_groups, backends)
    return explanation(request._replace(needs_backward=bool(needs_backward)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _over_mesh(request: Request, place: Place, rows: Rows, q: Array, k: Array, v: Array, sinks: Array | None) -> Any:
    lse = rows.lse(request.packed)
    mapped = jax.shard_map(
        partial(on_shards, request),
        mesh=place.mesh,
        in_specs=(rows.arrays,) * 3 + (P(rows.heads),),
        out_specs=(rows.arrays, lse) if request.options.return_lse else rows.arrays,
        axis_names=rows.manual,
    )
    return mapped(q, k, v, sinks)
