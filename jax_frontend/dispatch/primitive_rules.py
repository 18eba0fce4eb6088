"""What every primitive of ours tells JAX besides its meaning: that it can give NaN, and that it has no transpose."""

from __future__ import annotations

from functools import partial
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad

from attn_core.errors import SpecError

try:  # no public way to tell checkify of a primitive
    from jax._src.checkify import error_checks, nan_error_check
except ImportError:  # then jax.experimental.checkify.nan_checks sees NaN in what other operations make of our results
    error_checks = nan_error_check = None  # type: ignore[assignment]


def gives_nan(primitive: Primitive) -> None:
    """Lets ``jax.experimental.checkify.nan_checks`` look at a primitive's results."""
    if error_checks is not None:
        error_checks[primitive] = partial(nan_error_check, primitive)


def has_no_transpose(primitive: Primitive) -> None:
    """Refuses ``jax.linear_transpose`` of a primitive."""
    ad.primitive_transposes[primitive] = _refused


def _refused(cotangents: Any, *operands: Any, **_: Any) -> Any:
    raise SpecError(
        "jax.linear_transpose: expected a function whose operations are linear, and attention is not; use jax.vjp or "
        "jax.grad, for values alone (attention is linear in them), too"
    )
