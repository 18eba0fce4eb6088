"""Checks that an argument is of the expected kind, for arguments that are no tensors and no options of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError, shown

MOST = 2**31 - 1
"""The largest size: kernels count in int32."""


UNLISTED = (str, bytes, set, frozenset, Mapping)
"""What has elements and is no list of values: one text, and what has no order or no order that a call means."""


def check_kind(name: str, value: Any, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raises SpecError that names the argument and what was expected unless the value is of one of the types."""
    if not isinstance(value, kinds):
        raise SpecError(f"{name}={shown(value)}: expected {expected}, got {_type_of(value)}")


def check_size(name: str, value: Any, least: int) -> None:
    """Raises ShapeError unless the value is a whole number on the host and at least ``least``."""
    if not is_host_int(value) or value < least:
        raise ShapeError(f"{name}={shown(value)}: expected at least {least}, as an int")
    if value > MOST:
        raise ShapeError(f"{name}={shown(value)}: expected at most {MOST}")


def check_hashable(name: str, value: Any) -> None:
    """Raises SpecError unless the value can be a key of a dict. A tuple that contains a list cannot."""
    try:
        hash(value)
    except TypeError:
        raise SpecError(f"{name}={shown(value)}: expected a hashable value, got {_type_of(value)}") from None


def check_names(name: str, values: Any) -> tuple[Hashable, ...]:
    """Returns several hashable values as a tuple. Raises SpecError for anything else, also for one text or a set."""
    if isinstance(values, UNLISTED) or not isinstance(values, Iterable):
        raise SpecError(
            f"{name}={shown(values)}: expected a list of names, in the order of their tokens, got {_type_of(values)}"
        )
    try:
        found = tuple(values)
    except (TypeError, ValueError, RuntimeError) as error:  # an array without axes, or one of a sparse layout
        raise SpecError(f"{name}: expected a list of names, got {_type_of(values)} ({error})") from None
    for each in found:
        check_hashable(name, each)
    return found


def _type_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def is_size(value: Any) -> bool:
    """Returns whether a value may be a size: an integer on the host, or a dimension that ``jax.export`` leaves open."""
    return is_host_int(value) or (hasattr(value, "dimension_as_value") and not isinstance(value, type))
