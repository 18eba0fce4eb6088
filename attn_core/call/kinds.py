"""What kind of value an argument is: a number on the host, a symbol, an array; and checks of plain arguments."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeGuard

import numpy as np

from attn_core.errors import DTypeError, ShapeError, SpecError, shown

MOST = 2**31 - 1
"""The largest size: kernels count in int32."""
UNLISTED = (str, bytes, set, frozenset, Mapping)
"""What has elements and is no list of values: one text, and what has no order or no order that a call means."""


def is_host_int(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer on the host: an int, numpy's int, or a tracer's symbol. No tensor is."""
    if isinstance(value, (int, np.integer)):  # first, because Dynamo cannot look up attributes of a symbol
        return not isinstance(value, bool)
    # A class has the method of its objects.
    return hasattr(value, "__index__") and not isinstance(value, type) and not _has_shape(value)


def must_be_static(value: object) -> str:
    """Returns what to do about an array or a tracer in the place of a static option; empty for other values."""
    if not _has_shape(value) or isinstance(value, np.generic):
        return ""
    return "; it must be static: under jit close over it or name it in static_argnames, elsewhere pass a Python value"


def _has_shape(value: object) -> bool:
    try:
        return hasattr(value, "shape")
    except (RuntimeError, ValueError):  # a tensor whose shape is not known yet
        return True


def is_number(size: object) -> TypeGuard[int]:
    """Returns whether a size is a number. Comparing a symbolic size with a number can raise in its framework."""
    return isinstance(size, (int, np.integer))


def is_size(value: object) -> bool:
    """Returns whether a value may be a size: an integer on the host, or a dimension that ``jax.export`` leaves open."""
    return is_host_int(value) or (hasattr(value, "dimension_as_value") and not isinstance(value, type))


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises SpecError that names the argument and what was expected unless the value is of one of the types."""
    if not isinstance(value, kinds):
        raise SpecError(f"{name}={shown(value)}: expected {expected}, got {_type_of(value)}")


def check_size(name: str, value: object, least: int, most: int = MOST) -> None:
    """Raises ShapeError unless the value is a whole number on the host from ``least`` to ``most``."""
    if not is_host_int(value) or value < least:
        raise ShapeError(f"{name}={shown(value)}: expected at least {least}, as an int")
    if value > most:
        raise ShapeError(f"{name}={shown(value)}: expected at most {most}")


def check_int32(name: str, dtype: object) -> None:
    """Raises DTypeError unless a dtype, of any framework or its name, is int32."""
    if (text := str(dtype).removeprefix("torch.")) != "int32":
        raise DTypeError(f"{name}: expected dtype int32, got {text}; cast it to int32")


def check_within(name: str, values: np.ndarray | None, most: int | np.ndarray, what: str) -> None:
    """Raises SpecError for the first of several numbers on the host that is not from 0 to ``most``; None passes.

    Args:
        most: one number, or one for each value. what: what it is, after a comma or " because".
    """
    if values is not None and (wrong := (values < 0) | (values > most)).any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        limit = np.broadcast_to(most, values.shape)[at]
        raise SpecError(f"{name}{list(at)}={values[at]}: expected 0 to {limit}{what}")


def check_hashable(name: str, value: object) -> None:
    """Raises SpecError unless the value can be a key of a dict. A tuple that contains a list cannot."""
    try:
        hash(value)
    except TypeError:
        raise SpecError(f"{name}={shown(value)}: expected a hashable value, got {_type_of(value)}") from None


def listed(name: str, values: object, expected: str) -> tuple[Any, ...]:
    """Returns the values of a list as a tuple. Raises SpecError for anything else, also for one text or a set."""
    if isinstance(values, Iterable) and not isinstance(values, UNLISTED):
        try:
            return tuple(values)
        except (TypeError, ValueError, RuntimeError):  # an array without axes, without data, or of a sparse layout
            pass
    raise SpecError(f"{name}={shown(values)}: expected {expected}, got {_type_of(values)}")


def check_names(name: str, values: object) -> tuple[Hashable, ...]:
    """Returns several hashable values as a tuple. Raises SpecError for anything else, as ``listed`` does."""
    found = listed(name, values, "a list of names, in the order of their tokens")
    for each in found:
        check_hashable(name, each)
    return found


def _type_of(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
