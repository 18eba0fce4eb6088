"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as JAX or numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.paged.tables import TABLES
from attn_core.paged.tables import as_int32 as narrow
from jax_frontend.dispatch import plan


def checked_tables(*tables: Any, shapes_only: bool = False) -> tuple[Any, ...]:
    """Returns block_table, seq_lens and cu_seqlens_q, which may be None; those of numpy in int32.

    Raises:
        TypeError, DTypeError: for a table that is no JAX or numpy array. SpecError: for a value that int32 does not
            have.
    """
    named = dict(zip(TABLES, tables, strict=True))
    for name, table in named.items():
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_array(name, table, shapes_only=shapes_only)
    return tuple(narrow(n, t) if isinstance(t, np.ndarray) else t for n, t in named.items())


def copy_numpy(array: Any) -> Any:
    """Copies a numpy array; without the copy JAX may share its memory, and the caller may write to it too early."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def as_operand(array: Any) -> Any:
    """Returns an array of a call as a JAX array, one of int64 in int32, and None as it is.

    Numbers that int32 does not have become its nearest one, which is no page and no length, as before.
    """
    if not isinstance(array, jax.Array) or array.dtype != jnp.int64:
        return copy_numpy(array)
    limit = jnp.iinfo(jnp.int32)
    return jnp.clip(array, limit.min, limit.max).astype(jnp.int32)


def on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray | None]:
    """Returns those arrays by name whose values are on the host, as numpy's; None for an argument that is None."""
    there = {name: array for name, array in arrays.items() if array is None or plan.is_on_host(array)}
    return {name: None if array is None else np.asarray(array) for name, array in there.items()}
