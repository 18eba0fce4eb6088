"""Names the cases of parametrized tests by their values, so that ``-k`` finds them: ``causal=True``, not ``case4``."""

from __future__ import annotations

from dataclasses import Field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

from attn_core import AttentionSpec

LONGEST = 80


def pytest_make_parametrize_id(val: Any) -> str | None:
    """Returns the name of a value; None leaves it to pytest, which names strings, numbers, functions and classes."""
    name = _named(val)
    return None if name is None else name.replace("\n", " ")[:LONGEST]


def _named(value: Any) -> str | None:
    if isinstance(value, dict):
        return ",".join(f"{key}={_inside(each)}" for key, each in value.items()) or "nothing"
    if isinstance(value, (list, tuple)):
        return _inside(value)
    if isinstance(value, (set, frozenset)):
        return _inside(tuple(sorted(map(str, value))))
    if isinstance(value, AttentionSpec):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return _named({each.name: getattr(value, each.name) for each in fields(value) if _is_set(value, each)})
    return _dtype(value) or (_inside(value) if _is_array(value) or isinstance(value, partial) else None)


def _is_set(value: Any, field: Field) -> bool:
    """Whether a field of a dataclass has another value than its default."""
    return field.repr and repr(getattr(value, field.name)) != repr(field.default)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type)


def _inside(value: Any) -> str:
    """The text of a value that stands inside another one."""
    if isinstance(value, dict):
        return f"{{{_named(value)}}}"
    if isinstance(value, (list, tuple)):
        inside = ",".join(map(_inside, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    if _is_array(value) and not isinstance(value, np.generic):
        return f"{_dtype(value.dtype) or value.dtype} {list(value.shape)}"
    if isinstance(value, partial):
        return _inside(value.func)
    if value is None or isinstance(value, (str, bool, int, float, complex, np.generic)):
        return str(value)
    return _dtype(value) or getattr(value, "__name__", None) or type(value).__name__


def _dtype(value: Any) -> str | None:
    """The name of a dtype of torch or numpy."""
    is_dtype = isinstance(value, np.dtype) or type(value).__name__ == "dtype"
    return str(value).removeprefix("torch.") if is_dtype else None
