"""Runs a step whose tiles differ between parts by one custom call instead of branches.

All devices run one program. With branches, it needs one for every part whose tiles differ, and the host must wait for
the GPU to learn which branch to launch. A custom call knows its device, and hence its part. A callback that launches
torch's kernels runs that part's tiles in place, exactly as a torch rank would. If XLA can launch the kernels, the call
has the operators of every part, and needs no Python; XLA merges the results of a forward. A backward has no callback.

The part of each device is known when the program is lowered, because JAX runs a program on the mesh's devices in their
order. Without a concrete mesh, and in exported programs, the step uses branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.backends import kind_of
from attn_core.backends.shared.programs import operator_library
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch import operators
from attn_core.context_parallel.on_torch.gradient_operators import GradientStep
from attn_core.context_parallel.on_torch.step import StepCall
from attn_core.context_parallel.plan import Step
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedCall, BridgedStep, calls_of
from jax_frontend.context_parallel import step_primitive, tiles
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.tiles import PartTiles, TileContext, WholeRows, switch_by_part
from jax_frontend.dispatch import local_call
from jax_frontend.dispatch.ops import to_low_jaxpr
from jax_frontend.dispatch.partitioning import partly_manual
from jax_frontend.dispatch.plan import Plan

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
    form = GradientStep(step_call, of_keys, saved.dlse is not None, dq is not None)
    call = BridgedStep(step_call, context.device, context.overlaps_exchange, gradient=form)
    branches = _gradient_branches(context, tuple(parts), form)
    rows = (saved.out, saved.lse, saved.dout, *(() if saved.dlse is None else (saved.dlse,)))
    dq, dk, dv = _bind(call, axes, branches, False, q, *keys, *rows, *so_far)
    return dq, dk, dv


def _bind(call: BridgedStep, axes: RankAxes, branches: Any, callback: bool, *arrays: Array) -> list[Array]:
    operands = (*arrays, jnp.asarray(axes.part, jnp.int32))
    return step_primitive.step_p.bind(  # type: ignore[no-any-return]
        *operands,
        call=call,
        axis=axes.outer,
        meshes=(jax.sharding.get_abstract_mesh(), step_primitive.current_mesh()),
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
def _gradient_branches(context: TileContext, parts: tuple[PartTiles, ...], form: GradientStep) -> Any:
    """As ``_branches``, of the gradients."""
    count = form.step_call.key_arrays

    def run(q: Array, *rest: Array) -> Gradients:
        keys, (out, lse, dout, *more), part = rest[:count], rest[count:-1], rest[-1]
        saved = WholeRows(out, lse, dout, more.pop(0) if form.with_dlse else None)
        of_tiles = partial(tiles.gradients, context, form.of_keys)
        return switch_by_part(part, parts, of_tiles, q, keys, saved, *more)  # type: ignore[no-any-return]

    return jax.jit(run)
