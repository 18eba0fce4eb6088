"""The primitive ``attn_tangent``: a derivative that forward mode runs and reverse mode transposes.

``jax.custom_vjp`` has no forward mode, and the rule of a ``jax.custom_jvp`` no backward of its own. A ``custom_jvp``
whose tangents come from this primitive has both: reverse mode never runs it, and its transpose is the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_frontend.dispatch import primitive_rules
from jax_frontend.dispatch.vmap import mapped_first


class Linear(Protocol):
    """A derivative at residuals; hashable, and equal to another of the same meaning."""

    @property
    def results(self) -> tuple[int, ...]:
        """Which residuals have the types of the tangents out."""

    def tangent(self, *arrays: Any) -> Sequence[Any]:
        """Tangents out, from residuals and tangents in; linear in these."""

    def transpose(self, *arrays: Any) -> Sequence[Any]:
        """Cotangents of the tangents in, from residuals and cotangents; None is a zero."""


class Mapped(NamedTuple):
    """A derivative under vmap: tangents have the mapped axis in front, residuals where ``axes`` says 0 and not None."""

    each: Linear
    axes: tuple[int | None, ...]
    size: int

    @property
    def results(self) -> tuple[int, ...]:
        """Those of each element."""
        return self.each.results

    def tangent(self, *arrays: Any) -> Sequence[Any]:
        """That of each element."""
        return self._map(self.each.tangent, arrays)

    def transpose(self, *arrays: Any) -> Sequence[Any]:
        """That of each element."""
        return self._map(self.each.transpose, arrays)

    def _map(self, function: Any, arrays: tuple[Any, ...]) -> Any:
        rest = (None if array is None else 0 for array in arrays[len(self.axes) :])
        return jax.vmap(function, (*self.axes, *rest), axis_size=self.size)(*arrays)


def of(linear: Linear, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """The tangents out."""
    return tangent_p.bind(*residuals, *tangents, linear=linear, count=len(residuals))  # type: ignore[no-any-return]


def _run(*arrays: Any, linear: Linear, count: int) -> list[Any]:
    return list(linear.tangent(*arrays))


def _abstract(*arrays: Any, linear: Linear, count: int) -> list[Any]:
    return [arrays[at] for at in linear.results]


def _transposed(cotangents: Sequence[Any], *arrays: Any, linear: Linear, count: int) -> list[Any]:
    if all(isinstance(cotangent, ad.Zero) for cotangent in cotangents):
        return [None] * len(arrays)
    given = (None if isinstance(cotangent, ad.Zero) else cotangent for cotangent in cotangents)
    found = linear.transpose(*arrays[:count], *given)
    unknown = map(ad.is_undefined_primal, arrays[count:])  # a tangent that is known has no cotangent
    return [None] * count + [each if wanted else None for each, wanted in zip(found, unknown, strict=True)]


def _derivative(primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear, count: int) -> tuple[Any, Any]:
    """Forward mode of forward mode: of the operations that the tangent is made of."""
    moving = [at for at, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def run(*moved: Any) -> list[Any]:
        arrays = dict(enumerate(primals)) | dict(zip(moving, moved, strict=True))
        return list(linear.tangent(*arrays.values()))

    return jax.jvp(run, [primals[at] for at in moving], [tangents[at] for at in moving])  # type: ignore[no-any-return]


def _batched(
    arrays: Sequence[Any], axes: Sequence[int | None], *, linear: Linear, count: int
) -> tuple[list[Any], list[int]]:
    size, front, mapped = mapped_first(arrays, axes)
    for at in {*linear.results, *range(count, len(front))}:
        if not mapped[at]:
            front[at], mapped[at] = _broadcast(front[at], size, front[mapped.index(True)]), True
    each = Mapped(linear, tuple(0 if was else None for was in mapped[:count]), size)
    results = of(each, front[:count], front[count:])
    return results, [0] * len(results)


def _broadcast(array: Any, size: int, like: Any) -> Any:
    """An array with a mapped axis in front; on a mesh with Explicit axes split as that of an array that has one."""
    sharding = jax.typeof(like).sharding  # type: ignore[attr-defined]
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return jnp.broadcast_to(array, (size, *array.shape))
    own = jax.typeof(array).sharding.spec  # type: ignore[attr-defined]
    wanted = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0], *own))
    return jax.lax.broadcast(array, (size,), out_sharding=wanted)


tangent_p = Primitive("attn_tangent")
tangent_p.multiple_results = True
tangent_p.def_impl(_run)
tangent_p.def_abstract_eval(_abstract)
mlir.register_lowering(tangent_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[tangent_p] = _derivative
ad.primitive_transposes[tangent_p] = _transposed
primitive_rules.gives_nan(tangent_p)
batching.primitive_batchers[tangent_p] = _batched
