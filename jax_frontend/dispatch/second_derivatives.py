"""Which backend computes the derivatives of a call's gradients: JAX differentiates the operations of ``jax_xla``."""

from __future__ import annotations

from functools import lru_cache

from attn_core.selection import Target, forward_mode
from jax_frontend.dispatch import local_call
from jax_frontend.dispatch.vmap import MappedCall

AGAIN = "jax_xla"
"""The backend whose gradients and tangents have derivatives."""


@lru_cache(maxsize=1024)
def backend_of(call: MappedCall) -> MappedCall:
    """Returns the call of a JAX backend whose operations JAX differentiates in the place of a forward or backward.

    Raises:
        SpecError: if the caller named backends without ``jax_xla``, or ``jax_xla`` cannot run the call; with reasons.
    """
    if local_call.speaks_jax(call.call):
        return call
    spec, requested = call.call.spec, call.requested
    names = (AGAIN,) if requested is None or AGAIN in requested else requested
    choice = forward_mode.choose(spec, Target("jax", call.call.device), names, spec.aux_gradients, over_reverse=True)
    if choice.backend != AGAIN:
        raise choice.error()
    return call._replace(call=call.call._replace(backend=AGAIN))
