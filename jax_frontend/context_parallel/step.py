"""Runs a step whose tiles differ between parts by one custom call instead of branches.

All devices run one program. With branches, it needs one for every part whose tiles differ, and the host must wait for
the GPU to learn which branch to launch. A custom call knows its device, and hence its part. A callback that launches
torch's kernels runs that part's tiles in place, exactly as a torch rank would. If XLA can launch the kernels, the call
has the operators of every part (``attn_core.context_parallel.on_torch.operators``), and needs no Python; XLA merges the
results of a forward. A backward has no callback.

The part of each device is known when the program is lowered, because JAX runs a program on the mesh's devices in their
order. Without a concrete mesh, and in exported programs, the step uses branches: they are the primitive's parameter
``program``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.backends import kind_of
from attn_core.backends.shared.programs import operator_library, operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch import operators
from attn_core.context_parallel.on_torch.step import GradientForm, StepCall
from attn_core.context_parallel.plan import Step
from jax_frontend.bridge import compiled_lane, targets
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, calls_of
from jax_frontend.context_parallel import tiles
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, WholeRows, switch_by_part
from jax_frontend.dispatch import local_call, primitive_rules
from jax_frontend.dispatch.local_call import runs_on
from jax_frontend.dispatch.ops import to_low_jaxpr
from jax_frontend.dispatch.partitioning import partly_manual
from jax_frontend.dispatch.plan import Plan

try:  # jax.sharding.get_mesh returns the same, but raises an error while JAX traces
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # programs for GPUs then use branches
    get_concrete_mesh = None  # type: ignore[assignment]

log = logging.getLogger("attn_core.compiled_lane")

Array = jax.Array
Results = tuple[Array, Array]
"""(out, lse) of a part's rows."""
Gradients = tuple[Array, Array, Array]
"""(dq, dk, dv)."""


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
    if partly_manual() or not (callback or _by_operators(context, axes, parts, step_call)):
        return switch_by_part(axes.part, parts, partial(tiles.attend, context), q, keys, results)  # type: ignore[no-any-return]
    assert step_call.has_earlier_results == (results is not None)
    call = BridgedStep(step_call, context.device, context.overlaps_exchange)
    branches = _branches(context, tuple(parts), step_call.key_arrays)
    out, lse = _bind(call, axes, branches, callback, q, *keys, *(results or ()))
    return out, lse


def gradients(
    context: TileContext,
    axes: RankAxes,
    step: Step,
    parts: Sequence[PartTiles],
    q: Array,
    keys: tuple[Array, ...],
    saved: WholeRows,
    dq: Array | None,
) -> Gradients:
    """Runs ``tiles.gradients`` with the tiles of this device's part."""
    of_keys, so_far = "own" if step.own else "sent", () if dq is None else (dq,)
    step_call = StepCall(context.call, context.call.plan.steps.index(step), stacked=len(keys) == 1)
    direction = "backward with dlse" if saved.dlse is not None else "backward"
    if partly_manual() or not _by_operators(context, axes, parts, step_call, direction):
        run = partial(tiles.gradients, context, of_keys)
        return switch_by_part(axes.part, parts, run, q, keys, saved, *so_far)  # type: ignore[no-any-return]
    form = GradientForm(of_keys, saved.dlse is not None, dq is not None)
    call = BridgedStep(step_call, context.device, context.overlaps_exchange, gradient=form)
    branches = _gradient_branches(context, tuple(parts), step_call.key_arrays, form)
    rows = (saved.out, saved.lse, saved.dout, *(() if saved.dlse is None else (saved.dlse,)))
    dq, dk, dv = _bind(call, axes, branches, False, q, *keys, *rows, *so_far)
    return dq, dk, dv


def _bind(call: BridgedStep, axes: RankAxes, branches: Any, callback: bool, *arrays: Array) -> list[Array]:
    operands = (*arrays, jnp.asarray(axes.part, jnp.int32))
    return step_p.bind(  # type: ignore[no-any-return]
        *operands,
        call=call,
        axis=axes.outer,
        meshes=(jax.sharding.get_abstract_mesh(), current_mesh()),
        program=to_low_jaxpr(branches.trace(*operands).jaxpr),
        callback=callback,
    )


@lru_cache(maxsize=256)
def _runs_by_callback(call: ContextCall, device: str, step: Step) -> bool:
    """Returns whether all kernels of a step are torch's and launched by a callback."""
    kernels = {call.backend_of(tile) for of_part in step.tiles for tile in of_part}
    if any(local_call.speaks_jax(Plan(spec, name, device, one_row=False)) for spec, name in kernels):
        return False
    return all(compiled_lane.lane_of(calls_of(name, spec, device)[0]).program is None for spec, name in kernels)


def _by_operators(
    context: TileContext, axes: RankAxes, parts: Sequence[PartTiles], step_call: StepCall, direction: str = "forward"
) -> bool:
    """Returns whether a step runs as operators: to have no branch, or to give an exchange a head start."""
    if axes.outer is None or (len(set(parts)) == 1 and not context.overlaps_exchange):
        return False
    # Not in the cache below, because the library may be compiled later.
    return operator_library.missing() is None and _runs_operators(step_call, context.device, direction)


@lru_cache(maxsize=256)
def _runs_operators(step_call: StepCall, device: str, direction: str = "forward") -> bool:
    """Returns whether XLA launches all kernels of a step.

    Args:
        direction: "forward", "backward", or "backward with dlse".
    """
    kernels = {step_call.call.backend_of(tile) for of_part in step_call.step.tiles for tile in of_part}
    if operators.refusal(step_call, kind_of(device)) is not None:
        return False
    calls = [
        each for spec, name in kernels for each in calls_of(name, spec, device) if _direction_of(each) == direction
    ]
    return bool(calls) and all(compiled_lane.lane_of(each).program is not None for each in calls)


def _direction_of(call: BridgedCall) -> str:
    return f"{call.direction} with dlse" if "dlse" in call.extras else call.direction


@lru_cache(maxsize=256)
def _branches(context: TileContext, parts: tuple[PartTiles, ...], count: int) -> Any:
    """Returns a jitted function of a device's operands and its part, in operations that need no mesh."""

    def run(q: Array, *rest: Array) -> Results:
        keys, results, part = rest[:count], rest[count:-1], rest[-1]
        return switch_by_part(part, parts, partial(tiles.attend, context), q, keys, results or None)  # type: ignore[no-any-return]

    return jax.jit(run)


@lru_cache(maxsize=256)
def _gradient_branches(context: TileContext, parts: tuple[PartTiles, ...], count: int, form: GradientForm) -> Any:
    """As ``_branches``, of the gradients."""

    def run(q: Array, *rest: Array) -> Gradients:
        keys, (out, lse, dout, *more), part = rest[:count], rest[count:-1], rest[-1]
        saved = WholeRows(out, lse, dout, more.pop(0) if form.with_dlse else None)
        of_tiles = partial(tiles.gradients, context, form.of_keys)
        return switch_by_part(part, parts, of_tiles, q, keys, saved, *more)  # type: ignore[no-any-return]

    return jax.jit(run)


def text_of(call: BridgedStep, operands: Sequence[Any]) -> str | None:
    """Returns the operators of every device's part as one text, the same in every process, or None if it cannot.

    Args:
        operands: the types of the step's operands, without the part.
    """
    # A forward's text has no operands for earlier results: XLA merges them.
    read = operands if call.gradient is not None else operands[: 1 + call.step.key_arrays]
    about = tuple((tuple(each.shape), str(each.dtype)) for each in read)
    try:
        compiled_lane.register_launches()
        how = operator_recorder.FAKE_DEVICE, call.overlaps_exchange, call.gradient
        texts = operators.texts(call.step, about, *how)
    except Unrecordable:
        return None
    except Exception as error:  # an interface that changed upstream can raise anything, and branches still work
        log.warning("a step of (%s) runs in branches: %s: %s", call.spec, type(error).__name__, error)
        return None
    return operators.by_device({device: texts[part] for device, part in call.parts})


def _attend_by_operators(call: BridgedStep, text: str, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Returns out and lse: those of the tiles, by one custom call, merged into any earlier ones."""
    q_and_keys, earlier = operands[: 1 + call.step.key_arrays], operands[1 + call.step.key_arrays :]
    out_type, lse_type = results
    like = [(out_type.shape, q_and_keys[0].dtype), (lse_type.shape, lse_type.dtype)]
    launch = jax.ffi.ffi_call(OPERATOR, local_call.types_like(out_type, like))
    part, part_lse = launch(*q_and_keys, *_offsets(call), operators=text)
    if not earlier:
        return [part.astype(out_type.dtype), part_lse]
    out, lse = earlier
    # A row without a tile was not written.
    unseen = (part_lse == -jnp.inf).swapaxes(1, 2)[..., None]
    return list(tiles.merge(out, lse, jnp.where(unseen, 0, part), part_lse))


def _gradients_by_operators(call: BridgedStep, text: str, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Returns dq, dk and dv by one custom call. dq of earlier steps, the last operand, is updated in place."""
    assert call.gradient is not None
    types = local_call.types_like(results[0], [(each.shape, each.dtype) for each in results])
    aliases = {len(operands) - 1: 0} if call.gradient.with_dq else {}
    launch = jax.ffi.ffi_call(OPERATOR, types, input_output_aliases=aliases)
    return list(launch(*operands, *_offsets(call), operators=text))


def _offsets(call: BridgedStep) -> list[Any]:
    return list(map(jnp.asarray, operators.offsets(call.step)))


def _call_back(*operands: Any, call: BridgedStep, program: ClosedJaxpr) -> list[Any]:
    out, lse = program.out_avals
    types = [(out.shape, out.dtype), (lse.shape, lse.dtype)]
    scratch = [((call.step.scratch(kind_of(call.device)),), call.spec.dtype), ((lse.size,), lse.dtype)]
    return list(targets.run_step(call, local_call.types_like(out, [*types, *scratch]), *operands))


def run_operators(*operands: Any, call: BridgedStep, text: str, results: Sequence[Any]) -> list[Any]:
    """Returns a step's results, of the types ``results``; traceable."""
    run = _attend_by_operators if call.gradient is None else _gradients_by_operators
    return run(call, text, results, operands)


_lower_callback = mlir.lower_fun(_call_back, multiple_results=True)
_lower_operators = mlir.lower_fun(run_operators, multiple_results=True)


def _lower_for_cpu(ctx: Any, *operands: Any, call: BridgedStep, program: ClosedJaxpr, **about: Any) -> Any:
    if _is_exported(ctx) or not about["callback"] or not runs_on(call, "cpu"):
        return primitive_rules.lower_program(ctx, *operands, program=program)
    return _lower_callback(ctx, *operands, call=call, program=program)


def _lower_for_gpu(ctx: Any, *operands: Any, call: BridgedStep, program: ClosedJaxpr, **about: Any) -> Any:
    axis, callback = about["axis"], about["callback"]
    here = not _is_exported(ctx) and runs_on(call, "cuda")
    if here and callback and axis is None:  # every device has the only part
        return _lower_callback(ctx, *operands, call=call, program=program)
    parts = device_parts(ctx, axis, about["meshes"][1]) if here and axis is not None else ()
    # The last operand is the part, which `parts` replaces: on a GPU the host would have to wait for its value.
    known = ctx.replace(avals_in=ctx.avals_in[:-1])
    call = call._replace(parts=parts)
    if parts and callback:
        return _lower_callback(known, *operands[:-1], call=call, program=program)
    text = text_of(call, known.avals_in) if parts else None
    if text is not None:
        return _lower_operators(known, *operands[:-1], call=call, text=text, results=program.out_avals)
    return primitive_rules.lower_program(ctx, *operands, program=program)


def _is_exported(ctx: Any) -> bool:
    """Returns whether a program is exported to other processes, whose devices are not known here."""
    return bool(ctx.module_context.lowering_parameters.for_export)


def device_parts(ctx: Any, axis: str, traced_under: Any) -> tuple[tuple[int, int], ...]:
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


def current_mesh() -> Any:
    """Returns the mesh of ``jax.set_mesh`` with its devices; an empty mesh if none is set, None if JAX cannot tell."""
    return None if get_concrete_mesh is None else get_concrete_mesh()


def _batch(operands: Any, mapped: Any, *, program: ClosedJaxpr, **_: Any) -> tuple[list[Any], list[int]]:
    results = jax.vmap(jaxpr_as_fun(program), in_axes=tuple(mapped))(*operands)
    return results, [0] * len(results)


def _differentiate(primals: Any, tangents: Any, *, program: ClosedJaxpr, **_: Any) -> tuple[Any, Any]:
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
