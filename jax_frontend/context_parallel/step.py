"""Runs a forward step whose tiles differ between parts by one custom call instead of branches.

All devices run one program. With branches, it needs one for every part whose tiles differ, and the host must wait for
the GPU to learn which branch to launch. A custom call knows its device, and hence its part. A callback that launches
torch's kernels runs that part's tiles in place, exactly as a torch rank would. If the kernels are operators of torch,
the call has the operators of every part, and needs no Python; XLA merges their results.

The part of each device is known when the program is lowered, because JAX runs a program on the mesh's devices in their
order. Without a concrete mesh, and in exported programs, the step uses branches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.backends import kind_of
from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch import operators
from attn_core.context_parallel.on_torch.step import StepCall
from attn_core.context_parallel.plan import Step
from jax_frontend.bridge import compiled_lane, targets
from jax_frontend.bridge.bridged_call import BridgedStep, calls_of
from jax_frontend.bridge.bridged_run import parts_by_device
from jax_frontend.context_parallel import tiles
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, switch_by_part
from jax_frontend.dispatch import local_call, primitive_rules
from jax_frontend.dispatch.ops import jit_program, to_low_jaxpr
from jax_frontend.dispatch.partitioning import partly_manual
from jax_frontend.dispatch.plan import Plan
from jax_frontend.dispatch.platforms import runs_on

try:  # jax.sharding.get_mesh returns the same, but raises an error while JAX traces
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # programs for GPUs then use branches
    get_concrete_mesh = None  # type: ignore[assignment]

log = logging.getLogger("attn_core.compiled_lane")
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
    step_call = StepCall(context.call, context.call.plan.steps.index(step), stacked=len(keys) == 1)
    callback = not same and _runs_by_callback(context.call, context.device, step)
    by_operators = len(set(parts)) > 1 and _runs_operators(step_call, context.device)
    if partly_manual() or not (callback or by_operators):
        return switch_by_part(axes.part, parts, partial(tiles.attend, context), q, keys, results)  # type: ignore[no-any-return]
    operands = (q, *keys, *(results or ()), jnp.asarray(axes.part, jnp.int32))
    assert step_call.has_earlier_results == (results is not None)
    branches = _branches(context, tuple(parts), step_call.key_arrays).trace(*operands).jaxpr
    out, lse = step_p.bind(
        *operands,
        call=BridgedStep(step_call, context.device, context.overlaps_exchange),
        axis=axes.outer,
        meshes=(jax.sharding.get_abstract_mesh(), _current_mesh()),
        branches=to_low_jaxpr(branches),
        callback=callback,
    )
    return out, lse


@lru_cache(maxsize=256)
def _runs_by_callback(call: ContextCall, device: str, step: Step) -> bool:
    """Returns whether all kernels of a step are torch's and launched by a callback.

    Other kernels lose little by branches, because XLA launches them.
    """
    kernels = {call.backend_of(tile) for of_part in step.tiles for tile in of_part}
    if any(local_call.speaks_jax(Plan(spec, name, device, one_row=False)) for spec, name in kernels):
        return False
    return all(compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is None for spec, name in kernels)


@lru_cache(maxsize=256)
def _runs_operators(step_call: StepCall, device: str) -> bool:
    """Returns whether XLA runs all kernels of a step as operators of torch.

    Other kernels that XLA launches can be in a CUDA graph with their branches.
    """
    kernels = {step_call.call.backend_of(tile) for of_part in step_call.step.tiles for tile in of_part}
    if operators.refusal(step_call, kind_of(device)) is not None:
        return False
    return all(compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is not None for spec, name in kernels)


@lru_cache(maxsize=256)
def _branches(context: TileContext, parts: tuple[PartTiles, ...], count: int) -> Any:
    """Returns a jitted function of a device's operands and its part, in operations that need no mesh."""

    def run(q: Array, *rest: Array) -> Results:
        keys, results, part = rest[:count], rest[count:-1], rest[-1]
        return switch_by_part(part, parts, partial(tiles.attend, context), q, keys, results or None)  # type: ignore[no-any-return]

    return jax.jit(run)


def _impl(
    *operands: Any, call: BridgedStep, axis: str | None, meshes: Any, branches: ClosedJaxpr, **_: Any
) -> list[Any]:
    return list(jit_program(branches)(*operands))


def _result_types(
    *operands: Any, call: BridgedStep, axis: str | None, meshes: Any, branches: ClosedJaxpr, **_: Any
) -> list[Any]:
    return list(branches.out_avals)


def _evaluate_branches(*operands: Any, branches: ClosedJaxpr, **_: Any) -> list[Any]:
    return list(jaxpr_as_fun(branches)(*operands))


def _call_back(*operands: Any, call: BridgedStep, branches: ClosedJaxpr) -> list[Any]:
    out, lse = branches.out_avals
    types = [(out.shape, out.dtype), (lse.shape, lse.dtype)]
    scratch = [((call.step.scratch(kind_of(call.device)),), call.spec.dtype), ((lse.size,), lse.dtype)]
    return list(targets.run_step(call, local_call.types_like(out, [*types, *scratch]), *operands))


def _run_operators(*operands: Any, call: BridgedStep, text: str, branches: ClosedJaxpr) -> list[Any]:
    """Returns the step's results: those of the tiles, by one custom call, merged into any earlier ones."""
    q_and_keys, results = operands[: 1 + call.step.key_arrays], operands[1 + call.step.key_arrays :]
    out_type, lse_type = branches.out_avals
    like = [(out_type.shape, q_and_keys[0].dtype), (lse_type.shape, lse_type.dtype)]
    offsets = map(jnp.asarray, operators.offsets(call.step))
    part_types = local_call.types_like(out_type, like)
    part, part_lse = jax.ffi.ffi_call(OPERATOR, part_types)(*q_and_keys, *offsets, operators=text)
    if not results:
        return [part.astype(out_type.dtype), part_lse]
    out, lse = results
    # A row without a tile was not written.
    unseen = (part_lse == -jnp.inf).swapaxes(1, 2)[..., None]
    return list(tiles.merge(out, lse, jnp.where(unseen, 0, part), part_lse))


def _operator_text(call: BridgedStep, operands: Sequence[Any]) -> str | None:
    """Returns the operators of every device's part as one text, or None if this process cannot know or record them.

    Args:
        operands: the types of q and of the keys.
    """
    if jax.process_count() > 1:  # processes must lower one program, and a text has one process's devices
        return None
    parts = parts_by_device(call.parts, jax.local_devices(backend="gpu"))
    about = tuple((tuple(each.shape), str(each.dtype)) for each in operands)
    try:
        texts = operators.texts(call.step, about, operator_recorder.FAKE_DEVICE)
    except Unrecordable:
        return None
    except Exception as error:  # an interface that changed upstream can raise anything, and branches still work
        log.warning("a step of (%s) runs in branches: %s: %s", call.spec, type(error).__name__, error)
        return None
    return operators.by_device({device: texts[part] for device, part in parts.items()})


_lower_branches = mlir.lower_fun(_evaluate_branches, multiple_results=True)
_lower_callback = mlir.lower_fun(_call_back, multiple_results=True)
_lower_operators = mlir.lower_fun(_run_operators, multiple_results=True)


def _lower_for_cpu(ctx: Any, *operands: Any, call: BridgedStep, branches: ClosedJaxpr, **about: Any) -> Any:
    if _is_exported(ctx) or not about["callback"] or not runs_on(call, "cpu"):
        return _lower_branches(ctx, *operands, call=call, branches=branches, **about)
    return _lower_callback(ctx, *operands, call=call, branches=branches)


def _lower_for_gpu(ctx: Any, *operands: Any, call: BridgedStep, branches: ClosedJaxpr, **about: Any) -> Any:
    axis, callback = about["axis"], about["callback"]
    here = not _is_exported(ctx) and runs_on(call, "cuda")
    if here and callback and axis is None:  # every device has the only part
        return _lower_callback(ctx, *operands, call=call, branches=branches)
    parts = device_parts(ctx, axis, about["meshes"][1]) if here and axis is not None else ()
    # The last operand is the part, which `parts` replaces: on a GPU the host would have to wait for its value.
    known = ctx.replace(avals_in=ctx.avals_in[:-1])
    call = call._replace(parts=parts)
    if parts and callback:
        return _lower_callback(known, *operands[:-1], call=call, branches=branches)
    text = _operator_text(call, ctx.avals_in[: 1 + call.step.key_arrays]) if parts else None
    if text is not None:
        return _lower_operators(known, *operands[:-1], call=call, text=text, branches=branches)
    return _lower_branches(ctx, *operands, call=call, branches=branches, **about)


def _is_exported(ctx: Any) -> bool:
    """Returns whether a program is exported to other processes, whose devices are not known here."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def device_parts(ctx: Any, axis: str, traced_under: Any) -> tuple[tuple[int, int], ...]:
    """Returns (device id, index along a mesh axis) of every device that a program is lowered for; empty if unknown.

    JAX checks that a program runs on the devices of its meshes, in their order. For other devices it lowers the program
    again, because the branches contain a ``custom_partitioning``. A mesh that ``jax.shard_map`` took from
    ``jax.set_mesh`` is known to be the program's mesh only if it was also set when the program was traced.
    """
    mesh, now = getattr(ctx.module_context.axis_context, "mesh", None), _current_mesh()
    if now is None or not isinstance(mesh, jax.sharding.Mesh) or (mesh == now and now != traced_under):
        return ()
    along = mesh.axis_names.index(axis)
    return tuple((device.id, int(index[along])) for index, device in np.ndenumerate(mesh.devices))


def _current_mesh() -> Any:
    """Returns the mesh of ``jax.set_mesh`` with its devices; an empty mesh if none is set, None if JAX cannot tell."""
    return None if get_concrete_mesh is None else get_concrete_mesh()


def _batch(operands: Any, mapped: Any, *, branches: ClosedJaxpr, **_: Any) -> tuple[list[Any], list[int]]:
    results = jax.vmap(jaxpr_as_fun(branches), in_axes=tuple(mapped))(*operands)
    return results, [0] * len(results)


def _differentiate(primals: Any, tangents: Any, *, branches: ClosedJaxpr, **_: Any) -> tuple[Any, Any]:
    """Differentiates the branches. Their kernels then raise an error, because a tile has no derivative of its own."""
    # jax.jvp takes no symbolic zeros.
    tangents = [ad.instantiate_zeros(each) for each in tangents]
    return jax.jvp(jaxpr_as_fun(branches), primals, tangents)  # type: ignore[no-any-return]


# JAX caches a lowering by its parameters. ``meshes`` is a parameter so that two meshes do not share a lowering.
step_p = Primitive("attn_step")
step_p.multiple_results = True
step_p.def_impl(_impl)
step_p.def_abstract_eval(_result_types)
mlir.register_lowering(step_p, _lower_branches)
mlir.register_lowering(step_p, _lower_for_cpu, platform="cpu")
mlir.register_lowering(step_p, _lower_for_gpu, platform="cuda")
ad.primitive_jvps[step_p] = _differentiate
primitive_rules.has_no_transpose(step_p)
primitive_rules.gives_nan(step_p)
batching.primitive_batchers[step_p] = _batch
