"""How precisely XLA multiplies float32: as ``jax.default_matmul_precision`` says, and in full where nothing is said."""

from __future__ import annotations

from typing import Any


def product_precision(dtype: Any) -> Any:
    """``precision=`` of products of arrays of that dtype; None leaves the choice to ``jax.default_matmul_precision``.

    JAX's own default, DEFAULT, rounds float32 to TF32 on GPUs and to bfloat16 on TPUs. Attention would lose accuracy.
    So float32 is multiplied at HIGHEST unless the caller set a precision. float16 and bfloat16 need no rounding, and
    float64 is always multiplied at HIGHEST.
    """
    from jax.lax import Precision

    if dtype.itemsize == 2 or (dtype.itemsize == 4 and in_force() is not None):
        return None
    return Precision.HIGHEST


def in_force() -> str | None:
    """``jax.default_matmul_precision`` here; None where nothing is said."""
    import jax

    config: Any = jax.config
    return config.jax_default_matmul_precision  # type: ignore[no-any-return]


def level_in_force() -> int:
    """How precise float32 products are here: 0 as DEFAULT, 1 as HIGH, 2 as HIGHEST; 0 for a named algorithm."""
    from jax.lax import Precision

    said = in_force()
    try:
        return int(Precision.HIGHEST.value if said is None else Precision(said).value)
    except ValueError:  # the name of a lax.DotAlgorithmPreset
        return 0
