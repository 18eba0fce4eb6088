"""The precision of XLA's float32 products: ``jax.default_matmul_precision`` if it is set, else HIGHEST."""

from __future__ import annotations

from typing import Any


def product_precision(dtype: Any) -> Any:
    """Returns ``precision=`` for products of arrays of a dtype; None defers to ``jax.default_matmul_precision``.

    JAX's own default, DEFAULT, rounds float32 to TF32 on GPUs and to bfloat16 on TPUs. Attention would lose accuracy.
    So float32 is multiplied at HIGHEST unless the caller set a precision. float16 and bfloat16 need no rounding, and
    float64 is always multiplied at HIGHEST.
    """
    from jax.lax import Precision

    if dtype.itemsize == 2 or (dtype.itemsize == 4 and current_precision() is not None):
        return None
    return Precision.HIGHEST


def current_precision() -> str | None:
    """Returns the current ``jax.default_matmul_precision``; None if it is not set."""
    import jax

    config: Any = jax.config
    return config.jax_default_matmul_precision  # type: ignore[no-any-return]


def current_precision_level() -> int:
    """Returns the current precision of float32 products: 0 DEFAULT, 1 HIGH, 2 HIGHEST; 0 for a named algorithm."""
    from jax.lax import Precision

    setting = current_precision()
    try:
        # Unset means HIGHEST here; see ``product_precision``.
        return int(Precision.HIGHEST.value if setting is None else Precision(setting).value)
    except ValueError:  # the name of a lax.DotAlgorithmPreset
        return 0
