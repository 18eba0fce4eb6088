"""JAX's own attention function, even if a program has replaced ``jax.nn.dot_product_attention`` by ours."""

from __future__ import annotations

from typing import Any


def dot_product_attention(*arrays: Any, **keywords: Any) -> Any:
    """Calls JAX's function, also if a program has replaced ``jax.nn.dot_product_attention`` by ours."""
    return jax_function()(*arrays, **keywords)


def jax_function() -> Any:
    """Returns JAX's function from the module that defines it (the same module in jax 0.10 to 0.12).

    The public name may be ours by now, and calling that would recurse.
    """
    try:
        from jax._src.nn import functions
    except ImportError:  # a later JAX
        import jax.nn

        return jax.nn.dot_product_attention
    return functions.dot_product_attention
