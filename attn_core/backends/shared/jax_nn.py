"""JAX's own attention, also where a program has put ours in the place of ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from typing import Any


def dot_product_attention(*arrays: Any, **keywords: Any) -> Any:
    """JAX's function of that name. Never looked up in ``jax.nn``: ours might stand there, and would call itself."""
    return own()(*arrays, **keywords)


def own() -> Any:
    """That function, from the module that defines it (the same in jax 0.10 to 0.12)."""
    try:
        from jax._src.nn import functions
    except ImportError:  # a later JAX
        import jax.nn

        return jax.nn.dot_product_attention
    return functions.dot_product_attention
