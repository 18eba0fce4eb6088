"""From the arguments of a context-parallel call to its plan: what JAX knows at trace time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attn_core.call.options import Options, checked
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import request as requests
from attn_core.context_parallel.call import ContextCall, check_supported
from attn_core.context_parallel.cost.choose import Explanation
from attn_core.context_parallel.request import Metadata, Request
from attn_core.selection import Target
from jax_frontend.context_parallel.exchange import Axes
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.dispatch import plan


def requested(
    place: Place,
    inputs: Inputs,
    options: Options,
    seq_info: Any,
    length: Any,
    strategy: str | None,
    layout: str,
    head_groups: int | None,
    backends: tuple[str, ...] | None,
) -> Request:
    """The request of a call, without a backward.

    Args:
        inputs: arrays or ``jax.ShapeDtypeStruct``: shards inside ``jax.shard_map``, and outside all shards end to end.

    Raises:
        ShapeError, DTypeError, SpecError: for arguments that describe no call, and those that context parallelism does
            not support.
    """
    check_supported(inputs.mask, inputs.bias, inputs.alibi_slopes, options.dropout)
    q, k, v = (_metadata(array) for array in inputs[:3])
    return requests.build_request(
        (q, k, v),
        None if inputs.sinks is None else _metadata(inputs.sinks),
        length=length,
        documents=documents_of(seq_info),
        options=checked(options),
        strategy=strategy,
        layout=layout,
        head_groups=head_groups,
        axes=place.names,
        sizes=place.sizes,
        device=plan.device_name(inputs.q),
        needs_backward=False,
        requested=backends,
        shards_each=1 if place.inside else place.world,
    )


def explanation(request: Request) -> Explanation:
    """The plan of a call and why it was chosen."""
    return request.plan(_target(request))


def call_of(request: Request, *, needs_backward: bool) -> ContextCall:
    """The plan and the kernels of a call whose strategy is known."""
    return request._replace(needs_backward=needs_backward).call(_target(request))


def axes_of(request: Request) -> Axes:
    """The mesh axes of a call whose strategy is known."""
    return Axes.of(request.axes, request.sizes, request.strategy)


def on_device(request: Request, q: Any, k: Any, v: Any, sinks: Any) -> Request:
    """The request of one device, whose arrays may have a part of the batch and of the heads."""
    return request._replace(shards=tuple(None if array is None else _metadata(array) for array in (q, k, v, sinks)))


def documents_of(seq_info: Any) -> requests.Documents:
    """The offsets of a row's packed documents as plain numbers; see ``attn_core.context_parallel.request``."""
    return requests.documents_of(seq_info, _off_host)


def _off_host(offsets: Any) -> str | None:
    if isinstance(offsets, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "traced ones"
    on_device = isinstance(offsets, jax.Array) and plan.device_name(offsets) != "cpu"
    return f"an array on {plan.device_name(offsets)}" if on_device else None


def _metadata(array: Any) -> Metadata:
    return tuple(array.shape), np.dtype(array.dtype)


def _target(request: Request) -> Target:
    return Target.here("jax", request.device)
