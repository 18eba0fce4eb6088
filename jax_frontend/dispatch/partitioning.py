"""Tells XLA how to split a call over a mesh: by batch, by heads and by vmap's axes. Each device runs its own part.

XLA cannot split a custom call and would gather its operands on every device. ``custom_partitioning`` names the axes
that may be split. Any other axis is gathered if it was sharded; the split axes stay split. JAX's own backends use the
same rule: XLA could split their operations, but would gather every array whose split their shapes cannot express.
Packed documents lie in one row, so packed calls are split by heads alone.

If the mesh axis of the heads does not divide the kv heads, every device keeps all kv heads and picks those that its
query heads read; the gradients of the kv heads are summed over the devices. Gradients that sum over a split axis (of
sinks, of a bias shared by the batch or the heads) are summed over the devices, too. All these sums are in float32.

Calls with dropout never come here: in JAX only the XLA path has dropout (``attn_core.selection``). XLA splits its
operations itself, with indices in the whole call, so that the same weights are dropped under any sharding.

Inside a ``jax.shard_map`` over some axes of a mesh, JAX does not say how the other axes split an array. There, kernels
accept only arrays that are whole along the other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from attn_core.call.functions import AUX, by_row, reads
from attn_core.errors import SpecError
from jax_frontend.dispatch.split import Known, Part, Split, axes_of, part_of, split_of
from jax_frontend.dispatch.vmap import MappedCall


@lru_cache(maxsize=4096)
def make_partitionable(call: MappedCall, partly_manual: bool) -> Callable[..., list[Any]]:
    """Returns a function of a call's operands that XLA can split over a mesh; traceable, without a vmap rule."""

    def whole(*operands: Any) -> list[Any]:
        # custom_partitioning accepts no captured array constants; the inner jit holds them.
        return list(jax.jit(call.run)(*operands))

    function = custom_partitioning(whole)
    function.def_partition(
        partial(_partition, call),
        # Inside such a shard_map the mesh is unknown, so there is nothing to decode for; see _keep_whole.
        decode_shardings=not partly_manual,
        infer_sharding_from_operands=partial(_results_sharding, call),
        sharding_rule=partial(_rule, call),
    )
    return function  # type: ignore[no-any-return]


def partly_manual() -> bool:
    """Returns whether JAX is tracing inside a ``jax.shard_map`` over some, but not all, axes of a mesh."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in types and any(kind is not AxisType.Manual for kind in types)


def _known_shardings(call: MappedCall, operands: Sequence[Any], results: Sequence[Any]) -> Known:
    # Not strict: _results_sharding has no results yet.
    arrays = zip((*call.names, *call.call.results), (*operands, *results), strict=False)
    return [(name, array.shape, array.sharding.spec) for name, array in arrays if array.sharding is not None]


def _shardings(call: MappedCall, mesh: Any, split: Split, names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    return [
        NamedSharding(mesh, split.spec(axes_of(call, name, array.shape)))
        for name, array in zip(names, arrays, strict=True)
    ]


def _partition(call: MappedCall, mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    """Returns (mesh, function of one device's operands, result shardings, operand shardings), as XLA expects them."""
    if not all(isinstance(array.sharding, NamedSharding) for array in operands):
        return _keep_whole(call, mesh, operands, results)
    split = split_of(call, mesh, _known_shardings(call, operands, results))
    run = _without_mesh(partial(_run_part, part_of(call, mesh, split)))
    result_shardings = _shardings(call, mesh, split, call.call.results, results)
    return mesh, run, result_shardings, tuple(_shardings(call, mesh, split, call.names, operands))


def _without_mesh(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Runs a device's part without a mesh; JAX would otherwise type its arrays for the mesh that the caller has set."""

    def outside(*operands: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return run(*operands)

    return outside


def _keep_whole(
    call: MappedCall, mesh: Any, operands: Any, results: Any
) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    """Runs the whole call on every device, because its mesh is unknown.

    The mesh is unknown inside a ``jax.shard_map`` over some of its axes, and if no array has one.

    Raises:
        SpecError: if an operand is split.
    """
    for name, array in zip(call.names, operands, strict=True):
        if not array.sharding.is_fully_replicated:
            raise SpecError(
                f"{name}: expected to be whole along every mesh axis that jax.shard_map does not map over, got "
                f'{array.sharding}; let it map over every axis, or use backend="jax_xla"'
            )
    shardings = [[array.sharding for array in arrays] for arrays in (operands, results)]
    return mesh, _without_mesh(call.run), shardings[1], tuple(shardings[0])


def _results_sharding(call: MappedCall, mesh: Any, operands: Any, results: Any) -> list[Any]:
    """Returns the results' shardings, for GSPMD, the propagation that JAX used before Shardy."""
    split = split_of(call, mesh, _known_shardings(call, operands, ()))
    return _shardings(call, mesh, split, call.call.results, results)


def _rule(call: MappedCall, mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """Returns Shardy's rule: batch and heads are one factor each in all arrays, and every other axis must be whole.

    Query heads are the factors (kv heads, group) if every choice of mesh axes splits the kv heads evenly. An uneven
    choice would make Shardy split one mesh axis between both factors, which no PartitionSpec can express; kv heads
    are then a factor of their own, and ``_partition`` makes both agree. A single kv head is its own factor, too,
    because Shardy does not accept a factor of size 1 in a compound axis.
    """
    spec = call.call.spec
    factors = {
        "batch": "b",
        "heads": "h",
        "kv_heads": "k",
        **{f"mapped{at}": f"m{at}" for at in range(len(call.sizes))},
    }
    whole_axes = {
        "batch": by_row(spec) is None,
        "heads": reads(spec, "h"),
        "kv_heads": reads(spec, "h"),
    }  # as in ``split_of``
    factors = {axis: factor for axis, factor in factors.items() if not whole_axes.get(axis)}
    whole: list[str] = []
    sizes = {}
    if (
        "heads" in factors
        and spec.group_size > 1
        and spec.num_kv_heads > 1
        and spec.num_kv_heads % max(mesh.size, 1) == 0
    ):
        factors["heads"], sizes = "(k g)", {"g": spec.group_size}

    def factor(axis: str) -> str:
        if axis not in factors:
            whole.append(f"w{len(whole)}")
        return factors.get(axis) or whole[-1]

    def side(names: Sequence[str], types: Any) -> str:
        shapes = [tuple(kind.shape) for kind in types]
        axes = (axes_of(call, name, shape) for name, shape in zip(names, shapes, strict=True))
        return ", ".join(" ".join(map(factor, each)) for each in axes)

    text = f"{side(call.names, operands)} -> {side(call.call.results, results)}"
    return text, {"need_replication_factors": tuple(whole), **sizes}


def _run_part(part: Part, *operands: Any) -> list[Any]:
    """Runs the local call on one device's operands, and sums gradients over devices if their axis is split."""
    call = part.whole
    arrays = dict(zip(call.names, operands, strict=True))
    picked = _kv_heads_read(part) if part.picks_kv_heads else None
    if picked is not None:
        per_head = [name for name in ("k", "v", "dk", "dv") if name in arrays]
        arrays |= {name: jnp.take(arrays[name], picked, axis=-2) for name in per_head}
        scales = [name for name in ("k_scales", "v_scales") if name in arrays]
        arrays |= {name: jnp.take(arrays[name], picked, axis=-1) for name in scales}
        if (call.call.spec.key_ranges_shape or (1, 1))[1] > 1:
            arrays["key_ranges"] = jnp.take(arrays["key_ranges"], picked, axis=-4)
    results = dict(zip(call.call.results, part.local.run(*arrays.values()), strict=True))
    if call.call.direction != "backward":
        return list(results.values())
    for name, gradient in results.items():
        if picked is not None and name in ("dk", "dv"):
            results[name] = _sum_over(_scatter_kv_heads(part, gradient, picked), part.split.heads, gradient.dtype)
        elif name in ("dbias", "dsinks") and (over := _broadcast_axes(part, name)):
            results[name] = _sum_over(gradient, over, gradient.dtype)
        elif name.removeprefix("d") in AUX:  # every device has the whole array, or its own rows of it
            has_rows = AUX.index(name.removeprefix("d")) in (by_row(call.call.spec) or ())
            over = (*(() if has_rows else part.split.batch), *part.split.heads)
            results[name] = _sum_over(gradient, over, gradient.dtype) if over else gradient
    return list(results.values())


def _kv_heads_read(part: Part) -> Any:
    """Returns the kv heads that a device's query heads read: int32 ``[num_kv_heads of the local call]``."""
    local = part.local.call.spec
    first = jax.lax.axis_index(part.split.heads) * local.num_heads
    read_by = first + local.group_size * jnp.arange(local.num_kv_heads, dtype=jnp.int32)
    return read_by // part.whole.call.spec.group_size


def _scatter_kv_heads(part: Part, gradient: Any, picked: Any) -> Any:
    """Scatters ``[..., local kv heads, channels]`` into ``[..., kv heads, channels]``; the other heads are 0."""
    wide = (*gradient.shape[:-2], part.whole.call.spec.num_kv_heads, gradient.shape[-1])
    # add, not set: several local heads may be copies of one kv head.
    return jnp.zeros(wide, _sum_dtype(gradient)).at[..., picked, :].add(gradient.astype(_sum_dtype(gradient)))


def _broadcast_axes(part: Part, name: str) -> tuple[str, ...]:
    """Returns the mesh axes that split a call but not its bias or sinks; their gradient is a sum over these axes."""
    spec = part.whole.call.spec
    shape = spec.bias_shape or () if name == "dbias" else (spec.num_heads,)
    axes = axes_of(part.whole, name, (*part.whole.sizes, *shape))
    over = {"batch": part.split.batch, "heads": part.split.heads}
    return tuple(mesh_axis for axis, names in over.items() if axis not in axes for mesh_axis in names)


def _sum_over(gradient: Any, over: tuple[str, ...], dtype: Any) -> Any:
    """Sums over the devices of mesh axes in float32, because a sum of bfloat16 values would be rounded at each step."""
    return jax.lax.psum(gradient.astype(_sum_dtype(gradient)), over).astype(dtype)


def _sum_dtype(array: Any) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)
