"""``attention`` with key ranges whose values are on the host, as calls of kernels that have no key ranges."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_core.call.functions import are_given
from attn_core.call.key_ranges import check_values
from attn_core.call.options import Options, requested_names
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.one_device import choose
from attn_core.selection import override
from torch_frontend.context_parallel.differentiable import run_plan
from torch_frontend.context_parallel.mesh import SINGLE_RANK
from torch_frontend.context_parallel.prepare import RankPlan, build_rank_plan
from torch_frontend.dispatch import autograd, empty_rows, plan, sdpa_flags, transforms
from torch_frontend.dispatch.general_calls import gather_arguments

Tensor = torch.Tensor
Request = tuple[Any, ...]
"""The arguments of ``plan.request``."""


def attend(
    tensors: tuple[Any, ...],
    seq_info: Any,
    options: Options,
    backend: Any,
    key_ranges: np.ndarray,
    functions: Any,
    trains: bool = False,
) -> Any:
    """Returns the result of ``attention``; None if a backend runs the call as a whole, or nothing here can run it.

    Args:
        tensors: q, k, v, mask, bias, alibi_slopes and sinks, as the caller passed them; so are the other arguments.
        functions: mask_mod, score_mod and aux.
        trains: whether kernels must have a backward, although no tensor has a gradient.

    Raises:
        NoBackendError: if no requested backend can run the call, as a whole or as tiles.
    """
    # These are checked where the call then runs. Tiles take none of them.
    extras = *tensors[3:6], seq_info, options.dropout or None
    if any(each is not None for each in extras) or are_given(functions) or key_ranges.dtype != np.int32:
        return None
    inputs, options = gather_arguments(tensors, None, options, None)
    if transforms.is_one_op(inputs.q):
        return None
    needs_backward = trains or autograd.gradients_needed(inputs)[0]
    planned = _plan(_request(inputs, options, backend, key_ranges, needs_backward), key_ranges.tobytes())
    if planned is None:
        return None
    rows, rank_plan = planned
    q, k, v = inputs[:3] if rows == 1 else (_in_one_row(tensor) for tensor in inputs[:3])
    results = run_plan(rank_plan, q, k, v, inputs.sinks, options.return_lse, needs_backward)
    out, *lse = results if rows == 1 else _in_rows(results, inputs.q)
    if not lse:
        return out
    return out, lse[0] if inputs.sinks is None else empty_rows.fill_with_sinks(lse[0], inputs.sinks)


def _request(inputs: Inputs, options: Options, backend: Any, key_ranges: np.ndarray, needs_backward: bool) -> Request:
    """Returns the arguments of ``plan.request`` for a call with key ranges."""
    entries = list(plan.metadata(inputs))
    entries[Inputs._fields.index("key_ranges")] = (torch.Size(key_ranges.shape), torch.int32, inputs.q.device)
    switches, requested = sdpa_flags.now(), requested_names(backend) or override.requested()
    return tuple(entries), options, needs_backward, False, requested, switches


# By the values of the ranges, because an array may change between two calls. Small, because a plan holds tensors on the
# device: the places of tiles and their offsets.
@lru_cache(maxsize=64)
def _plan(request: Request, content: bytes) -> tuple[int, RankPlan] | None:
    """Checks a call and returns (its batch rows, its plan), or None if it does not run as tiles.

    Raises:
        ShapeError, SpecError: naming the argument. NoBackendError: as in ``attend``.
    """
    entries = request[0]
    shape, _, device = entries[Inputs._fields.index("key_ranges")]
    spec, target, names = plan.request(*request)
    key_ranges = np.frombuffer(content, np.int32).reshape(shape)
    check_values(key_ranges, spec.q_len)
    found = choose(spec, key_ranges, target, requested_names(names))
    if found is None:
        return None
    return found.rows, build_rank_plan(found.call, SINGLE_RANK, SINGLE_RANK, device)


def _in_one_row(tensor: Tensor) -> Tensor:
    """Returns ``[batch, tokens, heads, dim]`` as ``[1, batch * tokens, heads, dim]``."""
    return tensor.flatten(0, 1)[None]


def _in_rows(results: tuple[Tensor, ...], q: Tensor) -> tuple[Tensor, ...]:
    """Returns (out,) or (out, lse) of one row as those of the batch rows that it holds."""
    out, *lse = results
    batch, tokens = q.shape[:2]
    return out.unflatten(1, (batch, tokens))[0], *(each[0].unflatten(1, (batch, tokens)).movedim(0, 1) for each in lse)
