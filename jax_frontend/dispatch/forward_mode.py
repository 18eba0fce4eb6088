"""Forward mode by a kernel: the primitive ``attn_jvp``, and the choice of the backend that computes a call's tangents.

A call's results come from the backend of its plan. Its tangents come from one that claims forward mode, which
``attn_core.selection.forward_mode`` chooses: a kernel that has a ``jvp``, or JAX's own operations. Apart from
``differentiable``, because it is a call of its own with another plan.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, Tangents
from attn_core.errors import SpecError
from attn_core.selection import Target, forward_mode
from jax_frontend.bridge.bridged_call import BridgedCall
from jax_frontend.dispatch import local_call, ops
from jax_frontend.dispatch.plan import Plan
from jax_frontend.dispatch.second_derivatives import AGAIN
from jax_frontend.dispatch.vmap import MappedCall


def plan_of(call_plan: Plan, *, again: bool = False) -> Plan:
    """Returns the plan of a call's tangents.

    Args:
        call_plan: of the call, its ``aux_gradients`` the arrays that have tangents.
        again: whether the tangents will be differentiated.

    Raises:
        SpecError: if no backend, or not the requested one, can compute them; the message has every reason.
    """
    requested = call_plan.requested
    if again:
        if requested is not None and AGAIN not in requested:
            raise SpecError(
                f"backend={', '.join(requested)!r}: expected first derivatives, its kernels have no others; "
                f'backend="{AGAIN}" has a derivative of its forward mode'
            )
        requested = (AGAIN,)
    spec, backend = _choice(call_plan.spec, call_plan.device, requested)
    if backend == call_plan.backend:
        return call_plan
    return call_plan._replace(spec=spec, backend=backend, overlaps_exchange=False)


@lru_cache(maxsize=4096)
def _choice(spec: AttentionSpec, device: str, requested: tuple[str, ...] | None) -> tuple[AttentionSpec, str]:
    first = (requested or backends.FORWARD_MODE.get(("jax", backends.kind_of(device)), ()))[:1]
    choice = forward_mode.choose(spec, Target("jax", device), requested, spec.aux_gradients)
    # If JAX's own operations come first and serve, it does not matter what is installed; to look imports torch.
    if first != (AGAIN,) or choice.backend != AGAIN:
        choice = forward_mode.choose(spec, Target.here("jax", device), requested, spec.aux_gradients)
    return choice.spec, forward_mode.noted(choice)


def jvp(plan: Plan, inputs: Inputs, tangents: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the tangents of out and lse of a planned call; traceable.

    Args:
        plan: of a torch backend with forward mode.
        tangents: by the names of their arrays, in the shapes and dtypes of these.
    """
    names, operands = local_call.present_operands(inputs, False)
    extras = {f"d{name}": array for name, array in tangents.items()}
    assert set(extras) <= set(Tangents._fields)
    call = BridgedCall("jvp", plan.backend, plan.device, plan.spec, names, tuple(extras), checked=plan.checked)
    dout, dlse = ops.run_call(jvp_p, MappedCall(call, requested=plan.requested), (*operands, *extras.values()))
    return dout, dlse


jvp_p = ops.make_primitive("attn_jvp")
