"""``return_max_logit``: the primitive ``attn_row_maximum``, a pass over q and k beside the kernel of the output.

A backend whose forward has the row maxima at hand needs no pass (``ops.forward``). The backend of a pass
is one that ``attn_core.selection.row_maximum`` chooses: XLA's operations, or on a GPU a Triton kernel. Apart
from ``differentiable``, because a pass is a call of its own with another plan.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.in_jax import document_numbers, safe_offsets, usual_promotion
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.selection import row_maximum
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import local_call, ops, partitioning, plan
from jax_frontend.dispatch.vmap import MappedCall

Array = jax.Array


def by_a_pass(call_plan: plan.Plan, operands: Inputs) -> Array:
    """Returns the largest logit of each query head from a pass of its own; traceable.

    Args:
        call_plan: of the call, which may run on another backend.
        operands: of the call, as backends take them.
    """
    choice = _choice(call_plan.spec, call_plan.device)
    spec, backend = choice.spec, row_maximum.noted(choice)
    # Values, sinks and dropout change no logit. Backends expect some values, so the keys stand for them.
    operands = operands._replace(v=operands.k, sinks=None, rng=None)
    names, arrays = local_call.present_operands(jax.tree.map(jax.lax.stop_gradient, operands), False)
    call = MappedCall(BridgedCall("row_maximum", backend, call_plan.device, spec, names))
    if spec.empty:
        (rows,) = partitioning.run_under_auto_axes(partial(local_call.empty_results, call.call), call, arrays)
    else:
        (rows,) = ops.run_call(row_maximum_p, call, arrays)
    if spec.packed and not local_call.speaks_jax(call.call):  # XLA's own operations compute every row
        rows = within_documents(spec, rows, operands.cu_seqlens_q)
    return of_rows(rows)


@partial(jax.jit, static_argnums=(1, 2), inline=True)
def alone(inputs: Inputs, device: str, options: Options) -> Array:
    """Returns the largest logit of each query head of a call whose output something else computes."""
    metadata = plan.metadata(inputs)
    spec = plan.spec(metadata, device, options._replace(dropout=0.0, return_lse=False))
    call = plan.Plan(spec, "", device, plan.has_one_row(spec, metadata))
    return by_a_pass(call, ops.backend_inputs(call, inputs))


def within_documents(spec: AttentionSpec, rows: Array, cu_seqlens: Array) -> Array:
    """Returns row maxima ``[heads, tokens]``, -inf for tokens of a document beyond ``max_len_q``.

    A kernel's grid is sized for ``max_len_q``, so it leaves these rows of XLA's memory unwritten. Traced offsets cannot
    be checked before.
    """
    with usual_promotion():
        offsets = safe_offsets(cu_seqlens, spec.q_len)
        token = jnp.arange(spec.q_len, dtype=jnp.int32)
        first = offsets[document_numbers(offsets[1:], spec.q_len)]
        return jnp.where(token - first < (spec.max_len_q or 0), rows, -jnp.inf)


def of_rows(rows: Array) -> Array:
    """Returns the largest logits ``[batch, heads]``, packed ``[heads]``, of row maxima; no gradient passes them."""
    return jax.lax.stop_gradient(rows).max(-1, initial=-jnp.inf)


@from_records(maxsize=4096)
def _choice(spec: AttentionSpec, device: str) -> row_maximum.RowMaximum:
    order = backends.row_maximum_order("jax", backends.kind_of(device))
    choice: row_maximum.RowMaximum = plan.choice_beside(partial(row_maximum.choose, spec), order, device)
    return choice


row_maximum_p = ops.make_primitive("attn_row_maximum")
