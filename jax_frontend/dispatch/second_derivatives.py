"""The derivatives of a forward's or a backward's results: JAX differentiates the operations of ``jax_xla``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax

from attn_core.errors import SpecError
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


class OperationsDerivative(NamedTuple):
    """The derivative of a JAX backend's forward or backward, a ``tangent.Linear``: JAX differentiates its operations.

    Attributes:
        moving: for each operand, whether it has a tangent.
    """

    call: MappedCall
    moving: tuple[bool, ...]

    @property
    def results(self) -> tuple[int, ...]:
        """The indices of the call's results among the residuals, which are the operands and then the results."""
        count = len(self.call.call.results)
        return tuple(range(len(self.moving), len(self.moving) + count))

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the results and their tangents."""

        def run(*moved: Any) -> list[Any]:
            rest = iter(moved)
            return self.call.run(*(next(rest) if moves else x for x, moves in zip(primals, self.moving, strict=True)))

        moved = [array for array, moves in zip(primals, self.moving, strict=True) if moves]
        return jax.jvp(run, moved, list(tangents))  # type: ignore[no-any-return]

    def tangent(self, *arrays: Any) -> Sequence[Any]:
        """Forward mode: returns the tangents of the results."""
        residuals = len(self.moving) + len(self.results)
        return self.jvp(arrays[: len(self.moving)], arrays[residuals:])[1]  # type: ignore[no-any-return]

    def differentiable(self, *arrays: Any) -> Sequence[Any]:
        """Forward mode of forward mode: the operations are JAX's."""
        return self.tangent(*arrays)

    def transpose(self, *arrays: Any) -> Sequence[Any]:
        """Always raises: a backward's operations contain loops that JAX cannot differentiate in reverse mode."""
        raise SpecError(
            f"backend={self.call.call.backend!r}: expected second derivatives in forward over reverse mode "
            "(jax.hessian, jax.jvp of jax.grad), its gradients have no reverse mode"
        )
