"""A step as one custom call that runs operators of torch; see ``attn_core.context_parallel.on_torch.operators``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.backends.shared.programs import operator_recorder
from attn_core.backends.shared.programs.kernel_programs import OPERATOR, Unrecordable
from attn_core.context_parallel.on_torch import gradient_operators, operators
from jax_frontend.bridge import compiled_lane
from jax_frontend.bridge.bridged_call import BridgedStep
from jax_frontend.context_parallel import tiles
from jax_frontend.dispatch import local_call

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


def run(call: BridgedStep, text: str, results: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """Returns a step's results, of the types ``results``; traceable."""
    if call.gradient is not None:
        return _gradients(call, text, results, operands)
    return _attend(call, text, results, operands)


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
