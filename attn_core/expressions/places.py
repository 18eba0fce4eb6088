"""Where a function of the caller is, and which of its lines failed, for errors."""

from __future__ import annotations

import functools
import inspect
import linecache
from types import FrameType, TracebackType
from typing import Any

_NOT_THE_CALLERS = ("attn_core", "torch", "jax", "jaxlib", "numpy")


def name_of(function: Any) -> str:
    """Returns the name of a callable, such as ``'causal'``."""
    return str(getattr(_plain(function), "__qualname__", type(function).__qualname__))


def definition_of(function: Any) -> str:
    """Returns ``file:line: source`` of the line that defines a function; for one without source, its type."""
    code = getattr(_plain(function), "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if code else f"a {type(function).__qualname__} without source"


def failing_line(function: Any, error: BaseException) -> str:
    """Returns ``file:line: source`` of the caller's last line on the way to an error."""
    place = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if _is_the_callers(trace.tb_frame):
            place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return _line(*place) if place else definition_of(function)


def _is_the_callers(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_CALLERS


def _line(file: str, number: int) -> str:
    source = linecache.getline(file, number).strip()
    return f"{file}:{number}: {source}" if source else f"{file}:{number}"


def _plain(function: Any) -> Any:
    """The function inside partial objects, decorators and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if hasattr(function, "__code__") or inspect.isbuiltin(function):
        return function
    method = getattr(function, "__func__", None) or type(function).__call__
    return method if hasattr(method, "__code__") else function
