"""Takes part in the exchanges of a call without arguments of its own, so that ranks which exchange already do not wait.

The numbers are NaN. Every rank raises an error afterwards; a rank that reads its results before it learns of the error
must not take them for right ones.
"""

from __future__ import annotations

import torch

from attn_core.context_parallel import borders
from attn_core.context_parallel.call import keeps_borders, keeps_gathered
from torch_frontend.context_parallel import backward, forward
from torch_frontend.context_parallel.agreement.meeting import Exchange
from torch_frontend.context_parallel.forward import Residuals
from torch_frontend.context_parallel.prepare import RankPlan, prepare

Tensor = torch.Tensor


@torch.no_grad()
def stand_in(exchange: Exchange) -> None:
    """Sends and receives what this rank would in an exchange that the other ranks have begun."""
    request = exchange.request
    plan, compiled = prepare(request), exchange.kind.startswith("compiled")
    q, k, v, sinks = (
        None if each is None else torch.full(tuple(each[0]), torch.nan, dtype=each[1], device=request.device)
        for each in request.shards
    )
    assert q is not None and k is not None and v is not None
    if exchange.kind.endswith("forward"):
        with_lse = compiled or request.options.return_lse
        forward.forward(plan, q, k, v, sinks, with_lse=with_lse, keep=False)
        return
    dout = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=plan.lse_dtype)
    if compiled:
        residuals = forward.recompute_residuals(plan, q, k, v, dout, lse)
    else:
        residuals = [_residuals(plan, q, k, v)] * plan.call.head_groups
    sends_lse = request.options.return_lse and plan.inner.size > 1
    backward.backward(plan, residuals, sinks, dout, lse if sends_lse else None)


def _residuals(plan: RankPlan, q: Tensor, k: Tensor, v: Tensor) -> Residuals:
    """Returns residuals of one head group, as an eager forward saves them."""
    parts, part, (heads, kv_heads) = plan.call.plan, plan.outer.rank, plan.call.heads
    shared = plan.inner.size > 1
    rows = parts.q_blocks[part].count if shared else q.shape[1]
    keys = parts.k_blocks[part].count if shared else k.shape[1]

    def nan(places: int, heads: int, width: int) -> Tensor:
        return q.new_full((q.shape[0], places, heads, width), torch.nan)

    lse = q.new_full((q.shape[0], heads, rows), torch.nan, dtype=plan.lse_dtype)
    out, widths = nan(rows, heads, v.shape[3]), (k.shape[3], v.shape[3])
    gathered = [None, None]
    if keeps_gathered(plan.call.spec, parts):
        gathered = [nan(plan.outer.size * plan.k_size, kv_heads, width) for width in widths]  # type: ignore[misc]
    elif keeps_borders(plan.call.spec, parts):
        places = sum(borders.size(step.border) for step, _ in plan.steps if step.border is not None)
        gathered = [nan(places, kv_heads, width) for width in widths]  # type: ignore[misc]
    own = (nan(keys, kv_heads, width) for width in widths)
    return Residuals(nan(rows, heads, q.shape[3]), *own, out, lse, *gathered)  # type: ignore[call-arg]
