"""The primitive of a step that runs as one custom call, and its lowerings. ``step`` decides which steps do.

The call is a callback, or it runs operators of torch; see ``attn_core.context_parallel.on_torch.operators``. The
parameter ``program`` has the same step in branches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from attn_core.backends import kind_of
from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.context_parallel.on_torch import gradient_operators, operators
from jax_frontend.bridge import compiled_lane, targets
from jax_frontend.bridge.bridged_call import BridgedStep
from jax_frontend.context_parallel import tiles
from jax_frontend.dispatch import local_call, primitive_rules
from jax_frontend.dispatch.local_call import runs_on

try:  # jax.sharding.get_mesh returns the same, but raises an error while JAX traces
    from jax._src.mesh import get_concrete_mesh
except ImportError:  # programs for GPUs then use branches
    get_concrete_mesh = None  # type: ignore[assignment]

log = logging.getLogger("attn_core.compiled_lane")


def text_of(call: BridgedStep, operands: Sequence[Any]) -> str | None:
    """Returns the operators of every device's part as one text, the same in every process, or None if it cannot.

    Args:
        operands: the types of the step's operands, without the part.
    """
    about = tuple((tuple(each.shape), str(each.dtype)) for each in operands)
    how = operator_recorder.FAKE_DEVICE, call.overlaps_exchange
    try:
        compiled_lane.register_launches()
        if call.gradient is not None:
            texts = gradient_operators.texts(call.gradient, about, *how)
        else:
            texts = operators.texts(call.step, about[: 1 + call.step.key_arrays], *how)
    except Unrecordable:
        return None
    except Exception as error:  # an interface that changed upstream can raise anything, and branches still work
        log.warning("a step of (%s) runs in branches: %s: %s", call.spec, type(error).__name__, error)
        return None
    return operators.by_device({device: texts[part] for device, part in call.parts})


def _attend(call: BridgedStep, text: str, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
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


def _gradients(call: BridgedStep, text: str, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
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
    run = _attend if call.gradient is None else _gradients
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
