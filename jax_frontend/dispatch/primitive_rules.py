"""JAX rules that our primitives share, above all those of primitives that run a program."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Never

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from attn_core.errors import SpecError

try:  # checkify has no public way to register a primitive
    from jax._src.checkify import error_checks, nan_error_check
except ImportError:  # then nan_checks reports a NaN of ours only once another operation has computed with it
    error_checks = nan_error_check = None  # type: ignore[assignment]


def gives_nan(primitive: Primitive) -> None:
    """Makes ``jax.experimental.checkify.nan_checks`` check a primitive's results."""
    if error_checks is not None:
        error_checks[primitive] = partial(nan_error_check, primitive)


def program_primitive(name: str) -> Primitive:
    """Creates a primitive whose parameter ``program``, a ClosedJaxpr, is what it computes. It has no transpose."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(_run_eagerly)
    primitive.def_abstract_eval(_result_types)
    mlir.register_lowering(primitive, lower_program)
    ad.primitive_transposes[primitive] = _raise_no_transpose
    gives_nan(primitive)
    return primitive


def _run_eagerly(*operands: jax.Array, program: ClosedJaxpr, **_: object) -> list[jax.Array]:
    """Runs a program compiled, under ``jax.disable_jit``, too, as every primitive of JAX is."""
    with jax.disable_jit(False):
        return list(_jit_program(program)(*operands))


@lru_cache(maxsize=4096)
def _jit_program(program: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
    """Returns the program as a jitted function. ``ops._count_compilation`` knows it by its name."""
    run = jaxpr_as_fun(program)

    def attention_program(*operands: jax.Array) -> list[jax.Array]:
        return run(*operands)

    return jax.jit(attention_program)


def _result_types(*operands: object, program: ClosedJaxpr, **_: object) -> list[Any]:
    return list(program.out_avals)


def _run_program(*operands: jax.Array, program: ClosedJaxpr, **_: object) -> list[jax.Array]:
    return list(jaxpr_as_fun(program)(*operands))


lower_program = mlir.lower_fun(_run_program, multiple_results=True)


def _raise_no_transpose(cotangents: object, *operands: object, **_: object) -> Never:
    raise SpecError(
        "jax.linear_transpose: expected a function whose operations are linear, but attention is not linear; use "
        "jax.vjp or jax.grad, also for the gradient of v alone (attention is linear in v)"
    )
