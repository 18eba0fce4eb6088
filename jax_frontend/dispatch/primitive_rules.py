"""JAX rules that all our primitives share: checkify looks for NaN in their results, and they have no transpose."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad

from attn_core.errors import SpecError

try:  # checkify has no public way to register a primitive
    from jax._src.checkify import error_checks, nan_error_check
except ImportError:  # then nan_checks reports a NaN of ours only once another operation has computed with it
    error_checks = nan_error_check = None  # type: ignore[assignment]


def gives_nan(primitive: Primitive) -> None:
    """Makes ``jax.experimental.checkify.nan_checks`` check a primitive's results."""
    if error_checks is not None:
        error_checks[primitive] = partial(nan_error_check, primitive)


def has_no_transpose(primitive: Primitive) -> None:
    """Makes ``jax.linear_transpose`` of a primitive raise SpecError."""
    ad.primitive_transposes[primitive] = _raise_no_transpose


def _raise_no_transpose(cotangents: Any, *operands: Any, **_: Any) -> Any:
    raise SpecError(
        "jax.linear_transpose: expected a function whose operations are linear, but attention is not linear; use "
        "jax.vjp or jax.grad, also for the gradient of v alone (attention is linear in v)"
    )
