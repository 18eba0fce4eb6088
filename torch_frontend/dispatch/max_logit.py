"""``return_max_logit``: the op ``attn::max_logit``, a pass over q and k beside the kernel of the output.

An eager call needs no pass if the forward of its backend has the row maxima at hand (``Capture``).
The op has the arguments of ``attn::forward`` and returns the largest logit of each query head. The backend is one that
``attn_core.selection.row_maximum`` chooses. Nothing here has a gradient: the tensors are detached first.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.torch_ranges import in_range_if_on
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.selection import row_maximum
from torch_frontend.dispatch import ops, plan, transforms
from torch_frontend.dispatch.autocast import switched_off
from torch_frontend.dispatch.op_arguments import Op, OpOptions, tensors_of, to_call
from torch_frontend.dispatch.plan import on_device
from torch_frontend.dispatch.run_plan import as_backends_take, check_host_values

Tensor = torch.Tensor
MAX_LOGIT = Op("max_logit", (), ("max_logit",))


@from_records(maxsize=4096)
def plan_of(metadata: Inputs, options: Options) -> plan.PlanBeside:
    """Checks a call and chooses the backend of its largest logits; the arguments are those of ``plan.plan``."""
    whole, target, _ = plan.request(metadata, options, False, False, None)
    choice = row_maximum.choose(whole, target)
    return plan.plan_beside("row_maximum", row_maximum.noted(choice), choice.spec, target, metadata)


class Capture:
    """Takes the largest logits from the forward of an eager call, if its backend has them at hand."""

    max_logit: Tensor | None = None

    def of(self, call_plan: plan.Plan, device: torch.device) -> plan.Plan:
        """Returns the plan with a forward that also leaves the largest logits here; the plan itself if it has none."""
        own = (
            None
            if call_plan.in_parts or call_plan.instead
            else backends.load(call_plan.backend, backends.kind_of(str(device)))
        )
        function = own and own.forward_with_maximum(call_plan.spec)
        if not function:
            return call_plan  # ``max_logit`` stays None, and the caller makes a pass
        run = in_range_if_on(on_device(function, device), call_plan.backend, "forward")

        def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
            out, lse, rows = run(spec, inputs)
            self.max_logit = rows.amax(-1)
            return out, lse

        # Without the shortcut, which would run in the place of this forward. It takes no buffers.
        return call_plan._replace(forward=forward, shortcut=None, writes_into=False)


def by_a_pass(inputs: Inputs, options: Options) -> Tensor:
    """Returns the largest logit of each query head: ``[batch, heads]``, packed ``[heads]``, without a gradient.

    Args:
        inputs: from ``gather_arguments``. options: the call's, checked.
    """
    inputs, options = _without_values(inputs, options)
    if transforms.is_one_op(inputs.q):
        how = OpOptions(options, False, False, None)
        return MAX_LOGIT.run(*to_call(inputs, how))  # type: ignore[no-any-return]
    return _run(inputs, options)


def _without_values(inputs: Inputs, options: Options) -> tuple[Inputs, Options]:
    """Returns a call without what does not change a logit, and without gradients; k stands for v."""
    detached = Inputs(*(None if each is None else each.detach() for each in inputs))
    none: dict[str, Any] = {"dropout": 0.0, "return_lse": False, "deterministic": False, "aux_gradients": ()}
    none["invariant"] = None
    return detached._replace(v=detached.k, sinks=None, rng=None), options._replace(**none)


def _run(inputs: Inputs, options: Options) -> Tensor:
    """Returns the largest logits of a call whose offsets give every token a document."""
    inputs = ops.with_ranges_on_device(inputs)
    call_plan = plan_of(plan.metadata(inputs), options)
    check_host_values(call_plan.spec, inputs)
    if call_plan.function is None:
        return _result_like(inputs).fill_(-torch.inf)
    with switched_off(inputs.q.device):
        rows = call_plan.function(call_plan.spec, as_backends_take(inputs, call_plan.one_row))
    return rows.amax(-1)  # type: ignore[no-any-return]


def _op(*call: object) -> Tensor:
    inputs, how = ops.complete(call)
    return _run(inputs, how.options)


def _fake(*call: object) -> Tensor:
    return _result_like(tensors_of(call))


def _result_like(inputs: Inputs) -> Tensor:
    q, heads = inputs.q, inputs.q.shape[-2]
    shape = (heads,) if inputs.cu_seqlens_q is not None else (q.shape[0], heads)
    return q.new_empty(shape, dtype=plan.lse_dtype(q))


ops.register(MAX_LOGIT, _op, _fake)
