"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as JAX or numpy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.paged.tables import as_int32 as narrow
from jax_frontend.dispatch import plan


def check_kinds(block_table: Any, seq_lens: Any, cu: Any, shapes_only: bool = False) -> None:
    """Raises TypeError or DTypeError unless the tables are JAX or numpy arrays; cu may be None."""
    for name, table in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu)):
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_array(name, table, shapes_only=shapes_only)


def copy_numpy(array: Any) -> Any:
    """Copies a numpy array; without the copy JAX may share its memory, and the caller may write to it too early."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def numpy_as_int32(*tables: Any) -> tuple[Any, ...]:
    """Returns block_table, seq_lens and cu_seqlens_q, those of numpy in int32.

    Raises:
        SpecError: for a value that int32 does not have.
    """
    names = ("block_table", "seq_lens", "cu_seqlens_q")
    return tuple(narrow(n, t) if isinstance(t, np.ndarray) else t for n, t in zip(names, tables, strict=True))


def as_int32(table: Any) -> Any:
    """Returns an int64 table of JAX in int32, and any other argument as it is.

    Numbers that int32 does not have become its nearest one, which is no page and no length, as before.
    """
    if not isinstance(table, jax.Array) or table.dtype != jnp.int64:
        return table
    limit = jnp.iinfo(jnp.int32)
    return jnp.clip(table, limit.min, limit.max).astype(jnp.int32)


def on_host(arrays: dict[str, Any]) -> dict[str, np.ndarray | None]:
    """Returns those arrays by name whose values are on the host, as numpy's; None for an argument that is None."""
    there = {name: array for name, array in arrays.items() if array is None or plan.is_on_host(array)}
    return {name: None if array is None else np.asarray(array) for name, array in there.items()}
