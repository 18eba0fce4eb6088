"""Runs a forward step whose tiles differ between parts by one callback instead of branches.

All devices run one program. With branches, it needs one for every part whose tiles differ, and the host must wait for
the GPU to learn which branch to launch. A callback knows its device, and hence its part. It runs that part's tiles in
place, exactly as a torch rank would. Steps on kernels that XLA launches have branches, and so has every backward.

The part of each device is known when the program is lowered, because JAX runs a program on the mesh's devices in their
order. Without a concrete mesh, and in exported programs, the step uses branches: they are the primitive's parameter
``program``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.backends import kind_of
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch.step import StepCall
from attn_core.context_parallel.plan import Step
from jax_frontend.bridge import compiled_lane, targets
from jax_frontend.bridge.bridged_call import BridgedStep, calls_of
from jax_frontend.context_parallel import tiles
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, switch_by_part
from jax_frontend.dispatch import local_call, primitive_rules
from jax_frontend.dispatch.local_call import runs_on
from jax_frontend.dispatch.ops import to_low_jaxpr
from jax_frontend.dispatch.partitioning import partly_manual
from jax_frontend.dispatch.plan import Plan

try:  # jax.sharding.get_mesh returns the same, but raises an error while JAX traces
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # programs for GPUs then use branches
    get_concrete_mesh = None  # type: ignore[assignment]

Array = jax.Array
Results = tuple[Array, Array]
"""(out, lse) of a part's rows."""


def attend(
    context: TileContext,
    axes: RankAxes,
    step: Step,
    parts: Sequence[PartTiles],
    q: Array,
    keys: tuple[Array, ...],
    results: Results | None,
) -> Results:
    """Runs ``tiles.attend`` with the tiles of this device's part."""
    # If all parts have the same tiles, no branch is needed. With earlier results, the callback's merge is faster still,
    # and so it is for several tiles on one device, where it also gives the bits that torch gives.
    several = axes.names == () and len(parts[0].tiles) > 1
    same = len(set(parts)) == 1 and results is None and not several
    if partly_manual() or same or not _runs_by_callback(context.call, context.device, step):
        return switch_by_part(axes.part, parts, partial(tiles.attend, context), q, keys, results)  # type: ignore[no-any-return]
    step_call = StepCall(context.call, context.call.plan.steps.index(step), stacked=len(keys) == 1)
    assert step_call.has_earlier_results == (results is not None)
    operands = (q, *keys, *(results or ()), jnp.asarray(axes.part, jnp.int32))
    branches = _branches(context, tuple(parts), step_call.key_arrays)
    out, lse = step_p.bind(
        *operands,
        call=BridgedStep(step_call, context.device, context.overlaps_exchange),
        axis=axes.outer,
        meshes=(jax.sharding.get_abstract_mesh(), current_mesh()),
        program=to_low_jaxpr(branches.trace(*operands).jaxpr),
    )
    return out, lse


@lru_cache(maxsize=256)
def _runs_by_callback(call: ContextCall, device: str, step: Step) -> bool:
    """Returns whether all kernels of a step are torch's and launched by a callback."""
    kernels = {call.backend_of(tile) for of_part in step.tiles for tile in of_part}
    if any(local_call.speaks_jax(Plan(spec, name, device, one_row=False)) for spec, name in kernels):
        return False
    return all(compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is None for spec, name in kernels)


@lru_cache(maxsize=256)
def _branches(context: TileContext, parts: tuple[PartTiles, ...], count: int) -> Any:
    """Returns a jitted function of a device's operands and its part, in operations that need no mesh."""

    def run(q: Array, *rest: Array) -> Results:
        keys, results, part = rest[:count], rest[count:-1], rest[-1]
        return switch_by_part(part, parts, partial(tiles.attend, context), q, keys, results or None)  # type: ignore[no-any-return]

    return jax.jit(run)


def _call_back(*operands: Array, call: BridgedStep, program: ClosedJaxpr) -> list[Array]:
    out, lse = program.out_avals
    types = [(out.shape, out.dtype), (lse.shape, lse.dtype)]
    scratch = [((call.step.scratch(kind_of(call.device)),), call.spec.dtype), ((lse.size,), lse.dtype)]
    return list(targets.run_step(call, local_call.types_like(out, [*types, *scratch]), *operands))


_lower_callback = mlir.lower_fun(_call_back, multiple_results=True)


def _lower_for_cpu(
    ctx: mlir.LoweringRuleContext, *operands: Any, call: BridgedStep, program: ClosedJaxpr, **_: object
) -> Any:
    if _is_exported(ctx) or not runs_on(call, "cpu"):
        return primitive_rules.lower_program(ctx, *operands, program=program)
    return _lower_callback(ctx, *operands, call=call, program=program)


def _lower_for_gpu(
    ctx: mlir.LoweringRuleContext,
    *operands: Any,
    call: BridgedStep,
    axis: str | None,
    meshes: tuple[jax.sharding.AbstractMesh, jax.sharding.Mesh | None],
    program: ClosedJaxpr,
) -> Any:
    """Lowers a step to the bridge if its kernels are on this GPU, else to the program that runs part by part.

    Args:
        axis: the mesh axis of the parts; None if there is one part.
        program: the same step in operations of JAX.
    """
    here = not _is_exported(ctx) and runs_on(call, "cuda")
    if here and axis is None:  # every device has the only part
        return _lower_callback(ctx, *operands, call=call, program=program)
    parts = device_parts(ctx, axis, meshes[1]) if here and axis is not None else ()
    if not parts:
        return primitive_rules.lower_program(ctx, *operands, program=program)
    # The last operand is the part, which `parts` replaces: on a GPU the host would have to wait for its value.
    known = ctx.replace(avals_in=ctx.avals_in[:-1])
    return _lower_callback(known, *operands[:-1], call=call._replace(parts=parts), program=program)


def _is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is exported to other processes, whose devices are not known here."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def device_parts(
    ctx: mlir.LoweringRuleContext, axis: str, traced_under: jax.sharding.Mesh | None
) -> tuple[tuple[int, int], ...]:
    """Returns (device id, index along a mesh axis) of every device that a program is lowered for; empty if unknown.

    JAX checks that a program runs on the devices of its meshes, in their order. For other devices it lowers the program
    again, because the branches contain a ``custom_partitioning``. A mesh that ``jax.shard_map`` took from
    ``jax.set_mesh`` is known to be the program's mesh only if it was also set when the program was traced.
    """
    mesh, now = getattr(ctx.module_context.axis_context, "mesh", None), current_mesh()
    if now is None or not isinstance(mesh, jax.sharding.Mesh) or (mesh == now and now != traced_under):
        return ()
    along = mesh.axis_names.index(axis)
    return tuple((device.id, int(index[along])) for index, device in np.ndenumerate(mesh.devices))


def current_mesh() -> jax.sharding.Mesh | None:
    """Returns the mesh of ``jax.set_mesh`` with its devices; an empty mesh if none is set, None if JAX cannot tell."""
    return None if get_concrete_mesh is None else get_concrete_mesh()


def _batch(
    operands: Sequence[Array], mapped: Sequence[int | None], *, program: ClosedJaxpr, **_: object
) -> tuple[list[Array], list[int]]:
    results = jax.vmap(jaxpr_as_fun(program), in_axes=tuple(mapped))(*operands)
    return results, [0] * len(results)


def _differentiate(
    primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, program: ClosedJaxpr, **_: object
) -> tuple[Sequence[Array], Sequence[Array]]:
    """Differentiates the branches. Their kernels then raise an error, because a tile has no derivative of its own."""
    # jax.jvp takes no symbolic zeros.
    tangents = [ad.instantiate_zeros(each) for each in tangents]
    return jax.jvp(jaxpr_as_fun(program), primals, tangents)  # type: ignore[no-any-return]


# JAX caches a lowering by its parameters. ``meshes`` is a parameter so that two meshes do not share a lowering.
step_p = primitive_rules.program_primitive("attn_step")
mlir.register_lowering(step_p, _lower_for_cpu, platform="cpu")
mlir.register_lowering(step_p, _lower_for_gpu, platform="cuda")
ad.primitive_jvps[step_p] = _differentiate
batching.primitive_batchers[step_p] = _batch
