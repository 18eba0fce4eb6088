"""How XLA splits a call over a mesh: by batch, by heads and by what vmap maps, each device running its own part.

XLA cannot look into a custom call, and would gather its operands on every device. ``custom_partitioning`` tells it what
may be split. Every other axis is gathered where it was sharded, and no other axis is gathered with it. JAX's own
backends go the same way: XLA can look into them, but would gather what it cannot express in their shapes. Packed
documents live in one row, so those calls are split by heads alone.

Kv heads that the mesh axis of the heads does not divide stay whole on every device, which picks those that its own
query heads read; their gradients are summed over the devices. Gradients that sum over a split axis (of sinks, of a bias
shared by the batch or the heads) are summed over the devices, too, in float32.

Calls with dropout never come here: in JAX only the XLA path has it (``attn_core.selection``), whose operations XLA
splits by itself with the indices of the whole call, so that the same weights are dropped under any sharding.

Inside a ``jax.shard_map`` over some axes of a mesh JAX does not say by which of the others an array is split. Kernels
run there on arrays that those leave whole, and refuse others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from attn_core.errors import SpecError
from jax_frontend.dispatch.split import Known, Part, Split, axes_of, part_of, result_names, split_of
from jax_frontend.dispatch.vmap import Folded


@lru_cache(maxsize=4096)
def partitioned(call: Folded, partly_manual: bool) -> Callable[..., list[Any]]:
    """A function of a call's operands that XLA can split over a mesh; traceable, without a vmap rule."""

    def whole(*operands: Any) -> list[Any]:  # in a jit, which keeps arrays of constants: custom_partitioning takes none
        return list(jax.jit(call.run)(*operands))

    function = custom_partitioning(whole)
    function.def_partition(
        partial(_partition, call),
        decode_shardings=not partly_manual,
        infer_sharding_from_operands=partial(_results_sharding, call),
        sharding_rule=partial(_rule, call),
    )
    return function  # type: ignore[no-any-return]


def partly_manual() -> bool:
    """Whether this is traced inside a ``jax.shard_map`` over some axes of a mesh and not over others."""
    types = jax.sharding.get_abstract_mesh().axis_types
    return AxisType.Manual in types and any(kind is not AxisType.Manual for kind in types)


def under_auto_axes(run: Callable[..., list[Any]], call: Folded, operands: Sequence[Any]) -> list[Any]:
    """Runs a call; on a mesh with Explicit axes so that its types come out right: the rest is as on one with Auto.

    Results are split as the call is; a gradient has the type of what it is the gradient of.
    """
    shardings = [jax.typeof(array).sharding for array in operands]  # type: ignore[attr-defined]
    explicit = [found for found in shardings if AxisType.Explicit in found.mesh.axis_types]
    if not explicit:
        return run(*operands)
    mesh = explicit[0].mesh
    known = [(name, array.shape, at.spec) for name, array, at in zip(call.names, operands, shardings, strict=True)]
    split = split_of(call, mesh, known)
    shapes = {"out": call.call.spec.out_shape, "lse": call.call.spec.lse_shape}
    specs = {name: entry for name, _, entry in known} | {
        name: split.spec(axes_of(call, name, shape)) for name, shape in shapes.items()
    }
    wanted = [NamedSharding(mesh, specs[name if name in shapes else name[1:]]) for name in result_names(call)]
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    return jax.sharding.auto_axes(run, axes=axes, out_sharding=wanted)(*operands)  # type: ignore[no-any-return]


def _known(call: Folded, operands: Sequence[Any], results: Sequence[Any]) -> Known:
    arrays = zip((*call.names, *result_names(call)), (*operands, *results), strict=False)
    return [(name, array.shape, array.sharding.spec) for name, array in arrays if array.sharding is not None]


def _shardings(call: Folded, mesh: Any, split: Split, names: Sequence[str], arrays: Sequence[Any]) -> list[Any]:
    return [
        NamedSharding(mesh, split.spec(axes_of(call, name, array.shape)))
        for name, array in zip(names, arrays, strict=True)
    ]


def _partition(call: Folded, mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    if not all(isinstance(array.sharding, NamedSharding) for array in operands):
        return _keep_whole(call, mesh, operands, results)
    split = split_of(call, mesh, _known(call, operands, results))
    run = _outside_any_mesh(partial(_run_part, part_of(call, mesh, split)))
    made = _shardings(call, mesh, split, result_names(call), results)
    return mesh, run, made, tuple(_shardings(call, mesh, split, call.names, operands))


def _outside_any_mesh(run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A device's part has no sharding left to say, which JAX would say for the mesh that a caller has set."""

    def outside(*operands: Any) -> list[Any]:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return run(*operands)

    return outside


def _keep_whole(call: Folded, mesh: Any, operands: Any, results: Any) -> tuple[Any, Any, list[Any], tuple[Any, ...]]:
    """Where the mesh is not known: inside a ``jax.shard_map`` over some of its axes, or where no array has one.

    Raises:
        SpecError: when an operand is split.
    """
    for name, array in zip(call.names, operands, strict=True):
        if not array.sharding.is_fully_replicated:
            raise SpecError(
                f"{name}: expected to be whole along every mesh axis that jax.shard_map does not map over, got "
                f'{array.sharding}; let it map over every axis, or use backend="jax_xla"'
            )
    shardings = [[array.sharding for array in arrays] for arrays in (operands, results)]
    return mesh, _outside_any_mesh(call.run), shardings[1], tuple(shardings[0])


def _results_sharding(call: Folded, mesh: Any, operands: Any, results: Any) -> list[Any]:
    """What the propagation before Shardy asks for."""
    split = split_of(call, mesh, _known(call, operands, ()))
    return _shardings(call, mesh, split, result_names(call), results)


def _rule(call: Folded, mesh: Any, operands: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """Shardy's rule: batch and heads are the same factor wherever they occur, and every other axis must be whole.

    Kv heads are the outer factor of the heads that share them, if no choice of mesh axes could split that factor
    unevenly: then Shardy would split one mesh axis between both factors, which no PartitionSpec says. Elsewhere they
    are a factor of their own, and ``_partition`` brings both together. So is a single kv head, for Shardy takes no
    factor of size 1 beside another.
    """
    spec = call.call.spec
    factors = {
        "batch": "b",
        "heads": "h",
        "kv_heads": "k",
        **{f"mapped{at}": f"m{at}" for at in range(len(call.sizes))},
    }
    whole: list[str] = []
    sizes = {}
    if spec.group_size > 1 and spec.num_kv_heads > 1 and spec.num_kv_heads % max(mesh.size, 1) == 0:
        factors["heads"], sizes = "(k g)", {"g": spec.group_size}

    def factor(axis: str) -> str:
        if axis not in factors:
            whole.append(f"w{len(whole)}")
        return factors.get(axis) or whole[-1]

    def side(names: Sequence[str], types: Any) -> str:
        shapes = [tuple(kind.shape) for kind in types]
        axes = (axes_of(call, name, shape) for name, shape in zip(names, shapes, strict=True))
        return ", ".join(" ".join(map(factor, each)) for each in axes)

    text = f"{side(call.names, operands)} -> {side(result_names(call), results)}"
    return text, {"need_replication_factors": tuple(whole), **sizes}


def _run_part(part: Part, *operands: Any) -> list[Any]:
    """The local call on one device's operands, with what it needs of other devices."""
    call = part.whole
    arrays = dict(zip(call.names, operands, strict=True))
    picked = _own_kv_heads(part) if part.picks_kv_heads else None
    if picked is not None:
        arrays |= {name: jnp.take(arrays[name], picked, axis=-2) for name in ("k", "v")}
    results = dict(zip(result_names(call), part.local.run(*arrays.values()), strict=True))
    if call.call.direction == "forward":
        return list(results.values())
    for name, gradient in results.items():
        if picked is not None and name in ("dk", "dv"):
            results[name] = _summed(_among_all_kv_heads(part, gradient, picked), part.split.heads, gradient.dtype)
        elif name in ("dbias", "dsinks") and (over := _absent(part, name)):
            results[name] = _summed(gradient, over, gradient.dtype)
    return list(results.values())


def _own_kv_heads(part: Part) -> Any:
    """Which kv heads a device's own query heads read: int32 ``[num_kv_heads of the local call]``."""
    local = part.local.call.spec
    first = jax.lax.axis_index(part.split.heads) * local.num_heads
    read_by = first + local.group_size * jnp.arange(local.num_kv_heads, dtype=jnp.int32)
    return read_by // part.whole.call.spec.group_size


def _among_all_kv_heads(part: Part, gradient: Any, picked: Any) -> Any:
    """``[..., local kv heads, channels]`` as ``[..., kv heads, channels]``, 0 where the device read no such head."""
    wide = (*gradient.shape[:-2], part.whole.call.spec.num_kv_heads, gradient.shape[-1])
    return jnp.zeros(wide, _summing(gradient)).at[..., picked, :].add(gradient.astype(_summing(gradient)))


def _absent(part: Part, name: str) -> tuple[str, ...]:
    """The mesh axes that a call is split by and the gradient of its bias or sinks is not: it is a sum over them."""
    spec = part.whole.call.spec
    shape = spec.bias_shape or () if name == "dbias" else (spec.num_heads,)
    axes = axes_of(part.whole, name, (*part.whole.sizes, *shape))
    over = {"batch": part.split.batch, "heads": part.split.heads}
    return tuple(mesh_axis for axis, names in over.items() if axis not in axes for mesh_axis in names)


def _summed(gradient: Any, over: tuple[str, ...], dtype: Any) -> Any:
    return jax.lax.psum(gradient.astype(_summing(gradient)), over).astype(dtype)


def _summing(array: Any) -> Any:
    return jnp.promote_types(array.dtype, jnp.float32)
