"""``attention`` with key ranges whose values are on the host, as calls of kernels that have no key ranges."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from attn_core.call.functions import are_given
from attn_core.call.key_ranges import check_values
from attn_core.call.options import Options, check_options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.one_device import Tiled, choose, find
from attn_core.selection import NoBackendError, Target, explain, refusals
from jax_frontend.context_parallel import rank
from jax_frontend.context_parallel.mesh import RankAxes
from jax_frontend.context_parallel.prepare import RankPlan
from jax_frontend.dispatch import differentiable, plan
from jax_frontend.dispatch.differentiable import varying_alike

Array = jax.Array

ONE_RANK = RankAxes(None, None, 1, 1)
"""The axes of a device that shares nothing."""


class TiledCall(NamedTuple):
    """A call as tiles, in inference and in training, on a device of one kind.

    ``trained`` is the spec if no requested backend can train the call.
    """

    forward: Tiled
    trained: Tiled | AttentionSpec
    device: str
    requested: tuple[str, ...] | None
    return_lse: bool

    def rank_plan(self, *, needs_backward: bool) -> RankPlan:
        """Returns what the device runs.

        Raises:
            NoBackendError: if no requested backend can train the call.
        """
        found = self.trained if needs_backward else self.forward
        if not isinstance(found, Tiled):
            raise NoBackendError(explain(found, Target.here("jax", self.device), self.requested))
        return RankPlan(found.call, ONE_RANK, self.device)


def attend(
    inputs: Inputs,
    seq_info: object,
    options: Options,
    requested: tuple[str, ...] | None,
    functions: Any,
) -> Any:
    """Returns the result of ``attention``; None if a backend runs the call as a whole.

    Args:
        inputs: as the caller passed them, with key ranges of numpy; so are the other arguments.
        functions: mask_mod, score_mod and aux.
    """
    # These are checked where the call then runs. Tiles take none of them.
    extras = inputs.mask, inputs.bias, inputs.alibi_slopes, seq_info, options.dropout or None
    if any(each is not None for each in extras) or are_given(functions) or inputs.key_ranges.dtype != np.int32:
        return None
    plan.check_arrays(inputs)
    options = check_options(options)
    call = _tiled_call(inputs, options, requested)
    if call is None:
        return None
    q, k, v, sinks = inputs.q, inputs.k, inputs.v, inputs.sinks
    if sinks is not None:
        sinks = sinks.astype(jnp.promote_types(sinks.dtype, jnp.float32))
    alike = varying_alike(Inputs(q, k, v, sinks=sinks))
    results = _attend(call, alike.q, alike.k, alike.v, alike.sinks)
    if not options.return_lse or sinks is None:
        return results
    return results[0], differentiable.fill_with_sinks(results[1], alike.sinks)


def _tiled_call(inputs: Inputs, options: Options, requested: tuple[str, ...] | None) -> TiledCall | None:
    """Returns a call as tiles; None if a backend runs it as a whole.

    Automatic choice takes tiles only in traced programs, because each new mask is a new program. On a CPU it takes
    ``jax_xla``, which has key ranges, without a look at torch's backends, which would import torch.
    """
    q, device = inputs.q, plan.device_name(inputs.q)
    traced = isinstance(q, jax.core.Tracer) and device != "cpu"
    if requested is None and not (traced and rows_are_here(q.shape[0])):
        return None
    target, key_ranges = Target.here("jax", device), inputs.key_ranges
    metadata = plan.metadata(inputs)
    of_forward = plan.spec(metadata, device, options)
    of_training = plan.spec(metadata, device, options, needs_backward=True)
    check_values(key_ranges, of_forward.q_len)
    found = choose(of_forward, key_ranges, target, requested)
    trained = find(of_training, key_ranges, target, requested)
    if found is None:
        return None
    # JAX does not know yet whether the call will be differentiated. A backend that trains it as a whole runs it whole.
    if trained is None and any(not refusals(name, of_training, target) for name in requested or ()):
        return None
    if trained is None and requested is None:
        return None
    return TiledCall(found, trained or of_training, device, requested, options.return_lse)


def rows_are_here(batch: int) -> bool:
    """Returns whether tiles may have the batch rows end to end, because no axis of a mesh splits the batch.

    Outside ``jax.shard_map`` JAX decides that after the program is traced, if there are several devices.
    """
    manual = jax.sharding.get_abstract_mesh().axis_types
    return batch == 1 or jax.device_count() == 1 or (bool(manual) and set(manual) == {AxisType.Manual})


# Jitted, because an eager call would run every merge operation by operation.
@partial(jax.jit, static_argnums=0, inline=True)
def _attend(call: TiledCall, q: Array, k: Array, v: Array, sinks: Array | None) -> Array | tuple[Array, Array]:
    """Runs the tiles of a call. Batch rows lie end to end meanwhile, because the plan of tiles is that of one row."""
    batch, tokens = q.shape[:2]
    if call.forward.rows > 1:
        q, k, v = (array.reshape(1, -1, *array.shape[2:]) for array in (q, k, v))
    results = rank.attend(TiledCall.rank_plan, call, call.return_lse, q, k, v, sinks)
    out, lse = results if call.return_lse else (results, None)
    if call.forward.rows > 1:
        out = out.reshape(batch, tokens, *out.shape[2:])
        if lse is not None:  # [1, heads, batch * tokens] -> [batch, heads, tokens]
            lse = lse[0].reshape(-1, batch, tokens).swapaxes(0, 1)
    return out if lse is None else (out, lse)
