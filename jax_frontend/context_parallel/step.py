"""A forward step whose tiles differ between parts, run by one callback instead of branches.

All devices run one program. It needs a branch for every part whose tiles differ, and the host must wait for the GPU to
know which branch to launch. A callback that launches torch's kernels knows its device, hence its part: it runs that
part's tiles in place, exactly as a torch rank would.

The part of each device is known when the program is lowered, from the mesh: JAX runs a program on the mesh's devices in
their order. Without a concrete mesh, and in exported programs, the step uses branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.backends import kind_of
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch.step import StepCall
from attn_core.context_parallel.plan import Step
from jax_frontend.bridge import compiled_lane, targets
from jax_frontend.bridge.bridged_call import BridgedStep, calls_of
from jax_frontend.context_parallel import tiles
from jax_frontend.context_parallel.exchange import Axes, each_its_own
from jax_frontend.context_parallel.tiles import PartTiles, TileContext
from jax_frontend.dispatch import local_call, primitive_rules
from jax_frontend.dispatch.ops import jit_program, to_low_jaxpr
from jax_frontend.dispatch.partitioning import partly_manual
from jax_frontend.dispatch.plan import Plan
from jax_frontend.dispatch.platforms import at_home

try:  # jax.sharding.get_mesh is the same, and refused while JAX traces
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # programs for GPUs then use branches
    get_concrete_mesh = None  # type: ignore[assignment]

Array = jax.Array
Rows = tuple[Array, Array]
"""out and lse."""


def attend(
    context: TileContext,
    axes: Axes,
    step: Step,
    kinds: Sequence[PartTiles],
    q: Array,
    keys: tuple[Array, ...],
    so_far: Rows | None,
) -> Rows:
    """``tiles.attend`` with this device's tiles."""
    same = len(set(kinds)) == 1 and so_far is None  # with earlier results, torch's merge adds to them
    if same or partly_manual() or not _called_back(context.call, context.device, step):
        return each_its_own(axes.part, kinds, partial(tiles.attend, context), q, keys, so_far)  # type: ignore[no-any-return]
    operands = (q, *keys, *(so_far or ()), axes.part)
    step_call = StepCall(context.call, context.call.plan.steps.index(step), stacked=len(keys) == 1)
    assert step_call.has_earlier_results == (so_far is not None)
    branches = _branches(context, tuple(kinds), step_call.key_arrays).trace(*operands).jaxpr
    out, lse = step_p.bind(
        *operands,
        call=BridgedStep(step_call, context.device, context.overlaps_exchange),
        axis=axes.outer,
        meshes=(jax.sharding.get_abstract_mesh(), _in_force()),
        branches=to_low_jaxpr(branches),
    )
    return out, lse


@lru_cache(maxsize=256)
def _called_back(call: ContextCall, device: str, step: Step) -> bool:
    """Whether all kernels of a step are torch's and launched by a callback; branches cost other kernels little."""
    kinds = {call.backend_of(tile) for mine in step.tiles for tile in mine}
    if any(local_call.speaks_jax(Plan(spec, name, device, one_row=False)) for spec, name in kinds):
        return False
    return all(compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is None for spec, name in kinds)


@lru_cache(maxsize=256)
def _branches(context: TileContext, kinds: tuple[PartTiles, ...], count: int) -> Any:
    """A jitted function of a device's operands and its part, in operations that need no mesh."""

    def run(q: Array, *rest: Array) -> Rows:
        keys, so_far, part = rest[:count], rest[count:-1], rest[-1]
        return each_its_own(part, kinds, partial(tiles.attend, context), q, keys, so_far or None)  # type: ignore[no-any-return]

    return jax.jit(run)


def _impl(*operands: Any, call: BridgedStep, axis: str, meshes: Any, branches: ClosedJaxpr) -> list[Any]:
    return list(jit_program(branches)(*operands))


def _abstract(*operands: Any, call: BridgedStep, axis: str, meshes: Any, branches: ClosedJaxpr) -> list[Any]:
    return list(branches.out_avals)


def _taken(*operands: Any, call: BridgedStep, axis: str, meshes: Any, branches: ClosedJaxpr) -> list[Any]:
    return list(jaxpr_as_fun(branches)(*operands))


def _called(*operands: Any, call: BridgedStep, branches: ClosedJaxpr) -> list[Any]:
    out, lse = branches.out_avals
    types = [(out.shape, out.dtype), (lse.shape, lse.dtype)]
    scratch = [((call.step.scratch(kind_of(call.device)),), call.spec.dtype), ((lse.size,), lse.dtype)]
    return list(targets.run_step(call, local_call.types_like(out, [*types, *scratch]), *operands))


_by_branches = mlir.lower_fun(_taken, multiple_results=True)
_by_callback = mlir.lower_fun(_called, multiple_results=True)


def _lowered_for_cpu(ctx: Any, *operands: Any, call: BridgedStep, axis: str, meshes: Any, branches: ClosedJaxpr) -> Any:
    if _exported(ctx) or not at_home(call, "cpu"):
        return _by_branches(ctx, *operands, call=call, axis=axis, meshes=meshes, branches=branches)
    return _by_callback(ctx, *operands, call=call, branches=branches)


def _lowered_for_gpu(ctx: Any, *operands: Any, call: BridgedStep, axis: str, meshes: Any, branches: ClosedJaxpr) -> Any:
    parts = () if _exported(ctx) or not at_home(call, "cuda") else parts_of(ctx, axis, meshes[1])
    if not parts:
        return _by_branches(ctx, *operands, call=call, axis=axis, meshes=meshes, branches=branches)
    known = ctx.replace(avals_in=ctx.avals_in[:-1])
    return _by_callback(known, *operands[:-1], call=call._replace(parts=parts), branches=branches)


def _exported(ctx: Any) -> bool:
    """Whether a program is exported to other processes, whose devices are not known here."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def parts_of(ctx: Any, axis: str, traced_under: Any) -> tuple[tuple[int, int], ...]:
    """(device id, index along a mesh axis) of every device that a program is lowered for; empty if it is not known.

    JAX checks that a program's devices are those of its meshes, in their order, and lowers the program again for other
    devices, because the branches contain a ``custom_partitioning``. A mesh that ``jax.shard_map`` took from
    ``jax.set_mesh`` is known to be the program's only if it was also in force when the program was traced.
    """
    mesh, now = getattr(ctx.module_context.axis_context, "mesh", None), _in_force()
    if now is None or not isinstance(mesh, jax.sharding.Mesh) or (mesh == now and now != traced_under):
        return ()
    along = mesh.axis_names.index(axis)
    return tuple((device.id, int(index[along])) for index, device in np.ndenumerate(mesh.devices))


def _in_force() -> Any:
    """The mesh of ``jax.set_mesh`` with its devices; an empty mesh if none is set, None if JAX cannot tell."""
    return None if get_concrete_mesh is None else get_concrete_mesh()


def _batched(operands: Any, mapped: Any, *, branches: ClosedJaxpr, **_: Any) -> tuple[list[Any], list[int]]:
    results = jax.vmap(jaxpr_as_fun(branches), in_axes=tuple(mapped))(*operands)
    return results, [0] * len(results)


def _derivative(primals: Any, tangents: Any, *, branches: ClosedJaxpr, **_: Any) -> tuple[Any, Any]:
    """The derivative of the branches, whose kernels raise an error: they have none."""
    moved = [ad.instantiate_zeros(each) for each in tangents]
    return jax.jvp(jaxpr_as_fun(branches), primals, moved)  # type: ignore[no-any-return]


# JAX caches a lowering by its parameters. ``meshes`` is one, so that two meshes of one program do not share a lowering.
step_p = Primitive("attn_step")
step_p.multiple_results = True
step_p.def_impl(_impl)
step_p.def_abstract_eval(_abstract)
mlir.register_lowering(step_p, _by_branches)
mlir.register_lowering(step_p, _lowered_for_cpu, platform="cpu")
mlir.register_lowering(step_p, _lowered_for_gpu, platform="cuda")
ad.primitive_jvps[step_p] = _derivative
primitive_rules.has_no_transpose(step_p)
primitive_rules.gives_nan(step_p)
batching.primitive_batchers[step_p] = _batched
