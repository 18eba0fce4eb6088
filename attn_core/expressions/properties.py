"""What an expression reads: leaves and aux arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_core.errors import shown
from attn_core.expressions.intervals import INT_MAX, INT_MIN
from attn_core.expressions.operations import INDICES
from attn_core.expressions.tree import Expression, ExpressionError, Kind

_KINDS: dict[str, Kind] = {
    "bool": "bool",
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16"), "int"),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), "float"),
}


def uses(tree: Expression) -> frozenset[str]:
    """Returns what an expression reads: a subset of score, b, h, q, k and aux."""
    read = {row.op for row in tree.rows}
    return frozenset(read & {"score", *INDICES} | ({"aux"} if "lookup" in read else set()))


def is_index_only(tree: Expression) -> bool:
    """Whether the value depends on nothing but b, h, q and k: one table serves every call of the same sizes."""
    return uses(tree) <= set(INDICES)


def aux_numbers(tree: Expression) -> tuple[int, ...]:
    """Returns the numbers of the aux arrays that an expression reads, in order."""
    return tuple(sorted({int(row.value) for row in tree.rows if row.op == "lookup" and row.value is not None}))


def kind_of_dtype(dtype: Any) -> Kind | None:
    """Returns the kind that elements of a dtype have in an expression, None for a dtype without one.

    Args:
        dtype: of torch, numpy or JAX, or its name.
    """
    return _KINDS.get(getattr(dtype, "name", None) or str(dtype).removeprefix("torch."))


def check_aux(tree: Expression, aux: Sequence[Any]) -> None:
    """Checks the arrays of an expression's lookups: their number, axes, dtypes, and of numpy's arrays the values.

    Args:
        tree: the expression.
        aux: arrays of torch, numpy or JAX. Values on a device are not read.

    Raises:
        ExpressionError: if arrays are missing, have other axes or another kind of dtype, or hold an int beyond 32 bits.
    """
    for row in tree.rows:
        if row.op != "lookup":
            continue
        number = int(row.value or 0)
        if number >= len(aux):
            raise ExpressionError(f"aux: expected at least {number + 1} arrays, got {len(aux)}")
        array = aux[number]
        kind = kind_of_dtype(getattr(array, "dtype", None))
        if kind != row.kind or len(array.shape) != len(row.operands):
            raise ExpressionError(
                f"aux[{number}]: expected {len(row.operands)} axes and a dtype of kind {row.kind}, got {shown(array)}, "
                f"dtype {getattr(array, 'dtype', None)}"
            )
        check_ints(number, array)


def check_ints(number: int, array: Any) -> None:
    """Raises ExpressionError if aux array ``number`` is numpy's and holds an int beyond 32 bits."""
    if isinstance(array, np.ndarray) and array.dtype == np.int64 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < INT_MIN or high > INT_MAX:
            raise ExpressionError(f"aux[{number}]: expected ints of 32 bits, got values from {low} to {high}")
