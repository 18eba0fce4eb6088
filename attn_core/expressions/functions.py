"""The functions that a mask or score function may call on symbols, beside Python's operators."""

from __future__ import annotations

from typing import Any

from attn_core.expressions.building import cast
from attn_core.expressions.operators import Operand
from attn_core.expressions.symbols import Array, Recorder, Symbol
from attn_core.expressions.tree import ExpressionError


def where(condition: Any, a: Any, b: Any) -> Symbol:
    """Returns ``a`` where the condition is True, else ``b``.

    Args:
        condition: a bool symbol or a bool.
        a, b: symbols or numbers; an int beside a float becomes a float.
    """
    return _call("where", condition, a, b)


def minimum(a: Any, b: Any) -> Symbol:
    """Returns the lesser of two numbers; NaN if one is NaN."""
    return _call("minimum", a, b)


def maximum(a: Any, b: Any) -> Symbol:
    """Returns the greater of two numbers; NaN if one is NaN."""
    return _call("maximum", a, b)


def exp(x: Any) -> Symbol:
    """Returns the exponential of a number, a float."""
    return _call("exp", x)


def exp2(x: Any) -> Symbol:
    """Returns 2 to the power of a number, a float."""
    return _call("exp2", x)


def expm1(x: Any) -> Symbol:
    """Returns ``exp(x) - 1``, a float with all digits near 0."""
    return _call("expm1", x)


def log(x: Any) -> Symbol:
    """Returns the natural logarithm of a number, a float; NaN below 0."""
    return _call("log", x)


def log1p(x: Any) -> Symbol:
    """Returns ``log(1 + x)``, a float with all digits near 0."""
    return _call("log1p", x)


def sigmoid(x: Any) -> Symbol:
    """Returns ``1 / (1 + exp(-x))`` of a number, a float."""
    return _call("sigmoid", x)


def tanh(x: Any) -> Symbol:
    """Returns the hyperbolic tangent of a number, a float. A kernel may round it to 11 bits, as in its softcap."""
    return _call("tanh", x)


def to_int(x: Any) -> Symbol:
    """Returns a bool as 0 or 1. A float is refused, because there is no rounding."""
    return _recorder("to_int", x).wrap(cast(_recorder("to_int", x).tree(x), "int"))


def to_float(x: Any) -> Symbol:
    """Returns a bool or an int as a float of the dtype in which the expression runs."""
    return _recorder("to_float", x).wrap(cast(_recorder("to_float", x).tree(x), "float"))


def lookup(array: Any, *indices: Any) -> Symbol:
    """Returns a number of an array, as ``array[indices]`` does for arrays in aux and for torch's tensors.

    It also takes an array of numpy or JAX that the function captures, which cannot be indexed by a symbol. Such an
    array becomes one more operand; it is kept by identity.

    Args:
        array: bool, int (values of 32 bits) or float.
        indices: an int symbol or int for each axis. A negative index counts from the end, and is then clamped.
    """
    recorder = _recorder("lookup", *indices)
    found = (array if isinstance(array, Array) else recorder.array(array))[indices]
    return Symbol(recorder, recorder.tree(found))


def _call(op: str, *values: Any) -> Symbol:
    recorder = _recorder(op, *values)
    return recorder.symbol(op, *(recorder.tree(value) for value in values))


def _recorder(name: str, *values: Any) -> Recorder:
    for value in values:
        if isinstance(value, Operand):
            return value.recorder
    raise ExpressionError(f"{name}: expected a symbolic value among the arguments, such as q in a mask_mod(b, h, q, k)")
