"""Checks what a backend returns: shapes, dtypes and devices, and in ``checks`` mode the values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attn_core.call.checks import CheckWarning
from attn_core.call.tensors import dtype_name
from attn_core.errors import ResultError

MAY_HIDE = ("bias", "sinks", "lse")
"""Operands in which -inf has a meaning."""


def result_error(name: str, actual: Any, shape: tuple[int, ...], dtype: str, device: Any = None) -> ResultError:
    """Returns the error for a result of the wrong type, shape, dtype or device.

    Args:
        name: of the result: out, lse, dq and so on.
        device: the expected device; None if it cannot differ.
    """
    place = "" if device is None else f" on {device}"
    expected = f"{dtype} {list(shape)}{place}"
    if hasattr(actual, "shape") and hasattr(actual, "dtype"):
        where = "" if device is None else f" on {actual.device}"
        got = f"{dtype_name(actual)} {list(actual.shape)}{where}"
    else:
        got = type(actual).__name__
    return ResultError(
        f"{name}: the kernel returned {got}, expected {expected}; the installed version of its package does not do "
        "what this backend expects: name another backend, and see `attn doctor`"
    )


def warn_of_results(name: str, dropout: float, operands: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Warns of every finding.

    Args:
        name: the call's ``range_name``, which begins with the backend.
        operands, results: arrays by name, of numpy or bfloat16 of ml_dtypes; None for an absent one.
    """
    for finding in findings(name, dropout, operands, results):
        warnings.warn(finding, CheckWarning, stacklevel=2)


def findings(name: str, dropout: float, operands: Mapping[str, Any], results: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each result with NaN, if every operand is finite. The arguments are ``warn_of_results``'s.

    An output of infinity counts as well, because it is a mean of finite values; with dropout it is not. A gradient of
    half precision may overflow to infinity.
    """
    if not all(_is_finite(operand, array) for operand, array in operands.items()):
        return
    for result, array in results.items():
        wrong = None if array is None else _wrong(result, np.asarray(array), dropout)
        if wrong is not None and wrong.any():
            first = [int(index) for index in np.argwhere(wrong)[0]]
            yield (
                f"{result}: {int(wrong.sum())} of {wrong.size} values are NaN or infinite, the first is "
                f"{result}{first}, although every input of the call {name} is finite: the kernel is wrong for this "
                'call; name another backend, for instance backend="math"'
            )


def _wrong(result: str, array: np.ndarray, dropout: float) -> np.ndarray:
    """Returns where a result has a value that finite operands cannot give."""
    if result == "out" and not dropout:
        return ~np.isfinite(array)
    if result == "lse":  # -inf belongs to a row without keys
        return np.isnan(array) | (array == np.inf)
    return np.isnan(array)


def _is_finite(name: str, array: Any) -> bool:
    if array is None or np.issubdtype(np.asarray(array).dtype, np.integer) or np.asarray(array).dtype == bool:
        return True
    array = np.asarray(array)
    hides = (array == -np.inf) if name in MAY_HIDE else False
    return bool((np.isfinite(array) | hides).all())
