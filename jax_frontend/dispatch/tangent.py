"""The primitive ``attn_tangent``: a derivative that forward mode runs and reverse mode transposes.

``jax.custom_vjp`` has no forward mode, and ``jax.custom_jvp`` cannot define a backward. A ``custom_jvp`` whose tangents
come from this primitive has both: reverse mode never runs the primitive but transposes it, and its transpose is the
backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_frontend.dispatch import primitive_rules
from jax_frontend.dispatch.vmap import mapped_first


class Linear(Protocol):
    """A derivative at residuals; hashable, and equal to another derivative with the same meaning."""

    @property
    def results(self) -> tuple[int, ...]:
        """The indices of the residuals that have the types of the output tangents."""

    def tangent(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns the output tangents, from residuals and input tangents; linear in the input tangents."""

    def differentiable(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Returns ``tangent`` in operations that JAX differentiates; raises SpecError if there are none."""

    def transpose(self, *arrays: jax.Array | None) -> Sequence[jax.Array]:
        """Returns the cotangents of the input tangents, from residuals and output cotangents; None is a zero."""


class MappedDerivative(NamedTuple):
    """A derivative under vmap. Tangents have the mapped axis in front; a residual has it if its entry of axes is 0."""

    element: Linear
    axes: tuple[int | None, ...]
    size: int

    @property
    def results(self) -> tuple[int, ...]:
        """The indices of one element's derivative."""
        return self.element.results

    def tangent(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Maps the tangent over the elements."""
        return self._map(self.element.tangent, arrays)

    def differentiable(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Maps the differentiable tangent over the elements."""
        return self._map(self.element.differentiable, arrays)

    def transpose(self, *arrays: jax.Array | None) -> Sequence[jax.Array]:
        """Maps the transpose over the elements."""
        return self._map(self.element.transpose, arrays)

    def _map(
        self, function: Callable[..., Sequence[jax.Array]], arrays: tuple[jax.Array | None, ...]
    ) -> Sequence[jax.Array]:
        rest = (None if array is None else 0 for array in arrays[len(self.axes) :])
        return jax.vmap(function, (*self.axes, *rest), axis_size=self.size)(*arrays)


def bind(linear: Linear, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the output tangents, by a call of the primitive."""
    return tangent_p.bind(*residuals, *tangents, linear=linear, count=len(residuals))  # type: ignore[no-any-return]


def _run(*arrays: jax.Array, linear: Linear, count: int) -> list[jax.Array]:
    return list(linear.tangent(*arrays))


def _result_types(*arrays: Any, linear: Linear, count: int) -> list[Any]:
    return [arrays[at] for at in linear.results]


def _transpose(
    cotangents: Sequence[jax.Array | ad.Zero], *arrays: Any, linear: Linear, count: int
) -> list[jax.Array | None]:
    # No result matters, so no kernel runs.
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(arrays)
    nonzero = (None if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents)
    results = linear.transpose(*arrays[:count], *nonzero)
    unknown = map(ad.is_undefined_primal, arrays[count:])  # JAX asks for no cotangent of a known tangent
    return [None] * count + [each if is_unknown else None for each, is_unknown in zip(results, unknown, strict=True)]


def _derivative(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, linear: Linear, count: int
) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """Forward mode of forward mode: differentiates the operations of the tangent."""
    moving = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(*moved: jax.Array) -> list[jax.Array]:
        arrays = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return list(linear.differentiable(*arrays.values()))

    return jax.jvp(run, [primals[at] for at in moving], [tangents[at] for at in moving])  # type: ignore[no-any-return]


def _batch(
    arrays: Sequence[jax.Array], axes: Sequence[int | None], *, linear: Linear, count: int
) -> tuple[list[jax.Array], list[int]]:
    """The rule for vmap: the primitive with a derivative that maps the inner one, so it can be transposed again."""
    size, front, mapped = mapped_first(arrays, axes)
    # Tangents and the residuals of their types must all have the mapped axis: a result's type comes from its residual.
    for at in {*linear.results, *range(count, len(front))}:
        if not mapped[at]:
            front[at], mapped[at] = _broadcast(front[at], size, front[mapped.index(True)]), True
    derivative = MappedDerivative(linear, tuple(0 if is_mapped else None for is_mapped in mapped[:count]), size)
    results = bind(derivative, front[:count], front[count:])
    return results, [0] * len(results)


def _broadcast(array: jax.Array, size: int, like: jax.Array) -> jax.Array:
    """Returns the array with a mapped axis in front; on a mesh with Explicit axes split as the mapped axis of like."""
    sharding = jax.typeof(like).sharding  # type: ignore[attr-defined]
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.broadcast_to(array, (size, *array.shape))
    own = jax.typeof(array).sharding.spec  # type: ignore[attr-defined]
    result = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0], *own))
    return jax.lax.broadcast(array, (size,), out_sharding=result)


tangent_p = Primitive("attn_tangent")
tangent_p.multiple_results = True
tangent_p.def_impl(_run)
tangent_p.def_abstract_eval(_result_types)
mlir.register_lowering(tangent_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[tangent_p] = _derivative
ad.primitive_transposes[tangent_p] = _transpose
primitive_rules.gives_nan(tangent_p)
batching.primitive_batchers[tangent_p] = _batch
