"""From the arguments of a context-parallel call to its request and its plan, at trace time."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from attn_core.call.options import Options, checked
from attn_core.call.tensors import Inputs
from attn_core.context_parallel import request as requests
from attn_core.context_parallel.call import check_supported
from attn_core.context_parallel.request import Metadata, Request
from attn_core.selection import Target
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.dispatch import plan


def requested(
    place: Place, inputs: Inputs, options: Options, seq_info: Any, backends: tuple[str, ...] | None, **how: Any
) -> Request:
    """The request of a call, without a backward.

    Args:
        inputs: arrays or ``jax.ShapeDtypeStruct``: shards inside ``jax.shard_map``, and outside all shards end to end.
        how: strategy, layout, length and head_groups, as the caller gave them.

    Raises:
        ShapeError, DTypeError, SpecError: for invalid arguments, and for those that context parallelism lacks.
    """
    check_supported(inputs.mask, inputs.bias, inputs.alibi_slopes, options.dropout)
    q, k, v = (_metadata(array) for array in inputs[:3])
    return requests.build_request(
        (q, k, v),
        None if inputs.sinks is None else _metadata(inputs.sinks),
        **how,
        documents=document_offsets(seq_info),
        options=checked(options),
        axes=place.names,
        sizes=place.sizes,
        device=plan.device_name(inputs.q),
        needs_backward=False,
        requested=backends,
        shards_each=1 if place.inside else place.world,
    )


def on_device(request: Request, q: Any, k: Any, v: Any, sinks: Any) -> Request:
    """The request of one device, whose arrays may have a part of the batch and of the heads."""
    return request._replace(shards=tuple(None if array is None else _metadata(array) for array in (q, k, v, sinks)))


def document_offsets(seq_info: Any) -> requests.Documents:
    """The offsets of a row's packed documents as plain numbers; see ``attn_core.context_parallel.request``."""
    return requests.document_offsets(seq_info, _off_host)


def _off_host(offsets: Any) -> str | None:
    if isinstance(offsets, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "traced ones"
    on_device = isinstance(offsets, jax.Array) and plan.device_name(offsets) != "cpu"
    return f"an array on {plan.device_name(offsets)}" if on_device else None


def _metadata(array: Any) -> Metadata:
    return tuple(array.shape), np.dtype(array.dtype)


def target_of(request: Request) -> Target:
    """The kernels that can run a request."""
    return Target.here("jax", request.device)
