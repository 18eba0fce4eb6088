"""``return_max_logit``: the primitive ``attn_row_maximum``, a pass over q and k beside the kernel of the output.

The backend is one that ``attn_core.selection.row_maximum`` chooses: XLA's operations, or on a GPU a Triton kernel.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_core import backends
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.selection import Target, row_maximum
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import differentiable, local_call, ops, partitioning, plan
from jax_frontend.dispatch.vmap import MappedCall

Array = jax.Array


def max_logit(inputs: Inputs, options: Options) -> Array:
    """Returns the largest logit of each query head: ``[batch, heads]``, packed ``[heads]``; no gradient passes it.

    Args:
        inputs: from ``gather_arguments``. options: the call's, checked.
    """
    none: dict[str, Any] = {"dropout": 0.0, "return_lse": False, "deterministic": False, "aux_gradients": ()}
    inputs = inputs._replace(v=inputs.k, sinks=None, rng=None)
    device, options = plan.device_name(inputs.q), options._replace(**none)
    return _max_logit(options, device, differentiable.varying_alike(inputs))  # type: ignore[no-any-return]


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _max_logit(options: Options, device: str, inputs: Inputs) -> Array:
    inputs = jax.tree.map(jax.lax.stop_gradient, inputs)
    metadata = plan.metadata(inputs)
    choice = _choice(plan.spec(metadata, device, options, False, False), device)
    spec, backend = choice.spec, row_maximum.noted(choice)
    one_row = spec.packed and metadata[0] is not None and len(metadata[0][0]) == 4
    operands = differentiable.backend_inputs(plan.Plan(spec, backend, device, one_row), inputs)
    names, arrays = local_call.present_operands(operands, False)
    call = MappedCall(BridgedCall("row_maximum", backend, device, spec, names))
    if spec.empty:
        (rows,) = partitioning.run_under_auto_axes(partial(local_call.empty_results, call.call), call, arrays)
    else:
        (rows,) = ops.run_call(row_maximum_p, call, arrays)
    return rows.max(-1, initial=-jnp.inf)  # type: ignore[no-any-return]


@lru_cache(maxsize=4096)
def _choice(spec: AttentionSpec, device: str) -> row_maximum.RowMaximum:
    first = backends.of_kind(backends.ROW_MAXIMUM, "jax", backends.kind_of(device))[0]
    choice = row_maximum.choose(spec, Target("jax", device))
    # If JAX's own operations come first and serve, it does not matter what is installed; to look imports torch.
    if first == "jax_xla" and choice.backend == first:
        return choice
    return row_maximum.choose(spec, Target.here("jax", device))


row_maximum_p = ops.make_primitive("attn_row_maximum")
