"""Checks of the arguments of the constructors, and the array that they return."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.kinds import check_size
from attn_core.errors import ShapeError, SpecError, shown


def check_length(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """Returns a number of tokens as an int.

    Raises:
        ShapeError: unless it is a whole number from ``least`` to ``most``.
    """
    check_size(name, value, least)
    if most is not None and value > most:
        raise ShapeError(f"{name}={value}: expected at most {most}")
    return int(value)


def check_lengths(name: str, values: Any, least: int = 0) -> np.ndarray:
    """Returns numbers of tokens as int64 ``[n]``.

    Raises:
        ShapeError, SpecError: unless they are a sequence of whole numbers, each at least ``least``.
    """
    array = whole_numbers(name, values, (1,))
    if (array < least).any():
        at = int(np.argmax(array < least))
        raise ShapeError(f"{name}[{at}]={int(array[at])}: expected at least {least}")
    return array


def whole_numbers(name: str, values: Any, axes: tuple[int, ...]) -> np.ndarray:
    """Returns whole numbers as int64.

    Args:
        axes: the numbers of axes that the array may have.

    Raises:
        ShapeError, SpecError: for other values, and for another number of axes.
    """
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):
        array = np.asarray(None)
    if array.size and array.dtype.kind not in "iu":
        raise SpecError(f"{name}={shown(values)}: expected whole numbers on the host")
    if array.ndim not in axes:
        raise ShapeError(f"{name}: expected {' or '.join(map(str, axes))} axes, got shape {list(array.shape)}")
    return array.astype(np.int64)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """Returns where each part begins, and where the last one ends: int64 ``[n + 1]``."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def ranges_of(*pairs: tuple[Any, Any]) -> np.ndarray:
    """Returns key ranges int32 ``[batch or 1, 1, keys, len(pairs), 2]`` from starts and stops ``[batch, keys]`` each.

    They broadcast. A range whose stop is not behind its start becomes ``(0, 0)``, the empty range.
    """
    arrays = np.broadcast_arrays(*(np.atleast_2d(np.asarray(end, np.int64)) for pair in pairs for end in pair))
    whole = np.stack(arrays, -1).reshape(*arrays[0].shape, len(pairs), 2)
    whole = np.where(whole[..., :1] < whole[..., 1:], whole, 0)
    if whole.size and whole.max() > np.iinfo(np.int32).max:
        raise ShapeError(f"lengths: expected at most {np.iinfo(np.int32).max} queries in a row, got {whole.max()}")
    return np.ascontiguousarray(whole[:, None], np.int32)
