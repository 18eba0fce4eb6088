"""Turns a mask or score function into an expression: calls it once, with symbols in the place of numbers."""

from __future__ import annotations

import functools
import inspect
import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from attn_core.errors import shown
from attn_core.expressions.building import Refused
from attn_core.expressions.properties import kind_of_dtype
from attn_core.expressions.symbols import Array, Operand, Recorder, Symbol
from attn_core.expressions.tree import ALLOWED, INDICES, Expression, ExpressionError, Kind

_LEAVES = {leaf: Expression(leaf, "int") for leaf in INDICES} | {"score": Expression("score", "float")}


class Aux(NamedTuple):
    """The shape and dtype of an aux array, for tracing without the array.

    Attributes:
        shape: its sizes. Only their number matters, except to a constant index and to a function that reads them.
        dtype: a dtype of torch, numpy or JAX, or its name, such as ``"int32"``.
    """

    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """The expression of a function, and the arrays that it captured.

    Attributes:
        tree: the expression, plain data. Lookups name arrays by number: first those of ``aux``, then the captured.
        captured: arrays of torch, JAX or numpy that the function looked numbers up in, each once.
        aux_count: the number of arrays in ``aux``.
    """

    tree: Expression
    captured: tuple[Any, ...] = ()
    aux_count: int = 0


def trace_mask(function: Callable[..., object], aux: Sequence[object] = (), name: str = "mask_mod") -> TracedFunction:
    """Returns the expression of a mask function, which says whether query q sees key k.

    Args:
        function: ``f(b, h, q, k, *aux)`` with the ints batch row, query head, query and key; returns a bool. A
            ``mask_mod`` of torch's FlexAttention is one. It is called once.
        aux: the arrays that it gets, or their ``Aux``; it indexes them by ints: ``ids[b, q]``. An array without axes
            is a number. Values are not read.
        name: the argument that the function came from, for errors.

    Raises:
        ExpressionError: if the function does something that expressions do not have. The error names the function's
            line and what is allowed.
    """
    return _trace(name, function, aux, "bool", ())


def trace_score(function: Callable[..., object], aux: Sequence[object] = (), name: str = "score_mod") -> TracedFunction:
    """Returns the expression of a score function, which maps a scaled score to another.

    Args:
        function: ``g(score, b, h, q, k, *aux)`` with the score, a float, before the arguments of ``trace_mask``;
            returns a float. A ``score_mod`` of torch's FlexAttention is one. It is called once.
        aux, name: as in ``trace_mask``.

    Raises:
        ExpressionError: as ``trace_mask``.
    """
    return _trace(name, function, aux, "float", ("score",))


def _trace(
    name: str, function: Callable[..., object], aux: Sequence[object], kind: Kind, before: tuple[str, ...]
) -> TracedFunction:
    """Runs a function on symbols, and returns the tree of what it did. Its mistakes become an ExpressionError.

    Args:
        before: the leaves that come before the indices: the score, for a score function.
    """
    parameters = ", ".join((*before, *INDICES))
    if not callable(function):
        raise ExpressionError(f"{name}: expected a function of ({parameters}, *aux), got {shown(function)}")
    recorder = Recorder(len(aux))
    arguments: list[Any] = [Symbol(recorder, _LEAVES[leaf]) for leaf in (*before, *INDICES)]
    arguments += [_argument(recorder, number, array) for number, array in enumerate(aux)]
    try:
        tree = _result(recorder, function(*arguments), kind)
    except Refused as refusal:
        raise _error(name, function, refusal, str(refusal)) from None
    except ExpressionError:
        raise
    except Exception as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself failed
            _check_parameters(name, function, arguments, f"({parameters}) and {len(aux)} aux arrays")
        raise _error(name, function, error, _foreign(error)) from error
    _ = tree.text  # made here, because torch's compiler cannot make it
    return TracedFunction(tree, tuple(recorder.captured), len(aux))


def _argument(recorder: Recorder, number: int, array: Any) -> Array | Symbol:
    kind = kind_of_dtype(getattr(array, "dtype", None))
    if kind is None or not hasattr(array, "shape"):
        raise ExpressionError(f"aux[{number}]: expected an array of bool, ints or floats, got {shown(array)}")
    symbolic = Array(recorder, number, tuple(array.shape), kind)
    return symbolic if symbolic.shape else symbolic[()]


def _check_parameters(name: str, function: Callable[..., object], arguments: list[Any], expected: str) -> None:
    """Raises an error about a function's parameters, if the call that failed did not fit them."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function in C
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ExpressionError(
            f"{name}: expected a function that takes {expected}, got {name_of(function)!r} with the parameters "
            f"{signature} ({error}): {definition_of(function)}"
        ) from None


def _result(recorder: Recorder, result: object, kind: Kind) -> Expression:
    """Returns the expression of what a function returned; refuses another kind."""
    tree = None
    if isinstance(result, (Operand, bool, int, float)) or getattr(result, "shape", None) == ():
        tree = recorder.tree(result)
    if tree is None or tree.kind != kind:
        got = f"kind {tree.kind}" if tree else f"type {type(result).__name__}"
        advice = "compare, such as x != 0" if kind == "bool" else "return a float, such as where(x, score, -1.0)"
        raise Refused(f"a result of {got}: it must return a {kind}; {advice}")
    return tree


def _foreign(error: Exception) -> str:
    """What to do about an error of Python, numpy or JAX, which know nothing of symbols."""
    text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].rstrip('.')}"
    if not isinstance(error, (TypeError, IndexError, ValueError)):
        return text
    return (
        f"{text}. jax.numpy's functions take no symbols: write numpy's of that name, such as numpy.where, or one of "
        "attn_core.expressions. Arrays of numpy or JAX cannot be indexed by one: pass the array in aux, or write "
        "lookup(array, q). In the place of a dtype of the call write Python's own numbers"
    )


def _error(name: str, function: object, error: Exception, reason: str) -> ExpressionError:
    return ExpressionError(
        f"{name}: {name_of(function)!r} cannot become an expression, because of {reason}\n"
        f"  {failing_line(function, error)}\nAllowed: {ALLOWED}"
    )


_NOT_THE_CALLERS = ("attn_core", "torch", "jax", "jaxlib", "numpy")


def name_of(function: object) -> str:
    """Returns the name of a callable, such as ``'causal'``."""
    return str(getattr(_plain(function), "__qualname__", type(function).__qualname__))


def definition_of(function: object) -> str:
    """Returns ``file:line: source`` of the line that defines a function; for one without source, its type."""
    code = getattr(_plain(function), "__code__", None)
    return _line(code.co_filename, code.co_firstlineno) if code else f"a {type(function).__qualname__} without source"


def failing_line(function: object, error: BaseException) -> str:
    """Returns ``file:line: source`` of the caller's last line on the way to an error."""
    place = None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_CALLERS:
            place = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return _line(*place) if place else definition_of(function)


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
