"""Python's operators, and torch's and numpy's functions, on what a function gets while it is traced."""

from __future__ import annotations

from typing import Any

from attn_core.expressions.building import Refused, power
from attn_core.expressions.foreign_functions import METHODS, KindAsDtype, call_foreign
from attn_core.expressions.tree import Kind


class _NoAttribute(Refused, AttributeError):
    """An AttributeError, so that ``hasattr`` of a symbol works."""


def _no_value(what: str, instead: str) -> Any:
    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        raise Refused(f"{what}: a symbolic value has none; {instead}")

    return refuse


class Operand:
    """A symbol or an array. Its operators give symbols, or refuse.

    Attributes:
        recorder: ``symbols.Recorder`` of the trace that it belongs to.
        kind: of the value, or of the array's elements.
        device: None, which torch reads as its default; a symbol has none.
    """

    recorder: Any
    kind: Kind
    device = None

    @property
    def dtype(self) -> KindAsDtype:
        """What others may be cast to: ``x.to(score.dtype)``."""
        return KindAsDtype(self.kind)

    def _(self, op: str, *values: Any) -> Any:
        return self.recorder.symbol(op, *map(self.recorder.tree, values))

    def __add__(self, other: Any) -> Any:
        return self._("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._("subtract", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._("subtract", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._("multiply", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._("multiply", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._("divide", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._("divide", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._("floor_divide", other, self)

    def __mod__(self, other: Any) -> Any:
        return self._("remainder", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._("remainder", other, self)

    def __lshift__(self, other: Any) -> Any:
        return self._("shift_left", self, other)

    def __rlshift__(self, other: Any) -> Any:
        return self._("shift_left", other, self)

    def __rshift__(self, other: Any) -> Any:
        return self._("shift_right", self, other)

    def __rrshift__(self, other: Any) -> Any:
        return self._("shift_right", other, self)

    def __pow__(self, exponent: Any) -> Any:
        return self.recorder.wrap(power(self.recorder.tree(self), exponent))

    def __rpow__(self, base: Any) -> Any:
        raise Refused("a symbolic exponent: write exp2(x), or exp(x * log_of_base) with a constant")

    def __neg__(self) -> Any:
        return self._("negative", self)

    def __pos__(self) -> Any:
        return self.recorder.wrap(self.recorder.tree(self))

    def __abs__(self) -> Any:
        return self._("abs", self)

    def __lt__(self, other: Any) -> Any:
        return self._("less", self, other)

    def __le__(self, other: Any) -> Any:
        return self._("less_equal", self, other)

    def __gt__(self, other: Any) -> Any:
        return self._("less", other, self)

    def __ge__(self, other: Any) -> Any:
        return self._("less_equal", other, self)

    def __eq__(self, other: Any) -> Any:
        return self._("equal", self, other)

    def __ne__(self, other: Any) -> Any:
        return ~self._("equal", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Any:
        return self._("and", self, other)

    def __rand__(self, other: Any) -> Any:
        return self._("and", other, self)

    def __or__(self, other: Any) -> Any:
        return self._("or", self, other)

    def __ror__(self, other: Any) -> Any:
        return self._("or", other, self)

    def __xor__(self, other: Any) -> Any:
        return call_foreign(self.recorder, "logical_xor", (self, other), {})

    __rxor__ = __xor__

    def __invert__(self) -> Any:
        return self._("not", self)

    __bool__ = _no_value(
        "the truth value (if, while, and, or, not, in, or a chain such as 0 <= q < 9)",
        "write & | ~ with brackets, and where(condition, a, b)",
    )
    __iter__ = _no_value("a loop over it", "loop over Python's own numbers")
    __len__ = _no_value("a length", "array.shape has the sizes of an array")
    __index__ = _no_value("a number", "pass the array in aux, or write lookup(array, q)")
    __int__ = _no_value("int(...)", "write to_int(...)")
    __float__ = _no_value("float(...)", "write to_float(...)")
    __array__ = _no_value("an array", "use the functions of attn_core.expressions, and pass arrays in aux")
    __call__ = _no_value("a call", "call a function by its own name")
    __setitem__ = _no_value("an assignment", "write where(condition, a, b)")
    __contains__ = __bool__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a framework that asks what this is
            raise AttributeError(name)
        if name not in METHODS:
            raise _NoAttribute(f"the attribute {name}: a symbolic value has none of that name")
        return lambda *arguments, **options: call_foreign(
            self.recorder, name, _in_order(name, (self, *arguments)), options
        )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if type(function).__name__ == "method_descriptor":
            args = _in_order(name, args)
        return call_foreign(recorder_in(args), name, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return call_foreign(self.recorder, name, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call_foreign(self.recorder, function.__name__, args, kwargs)


def _in_order(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a method's arguments in the order of the function: ``x.where(condition, y)`` has the condition second."""
    return (args[1], args[0], *args[2:]) if name == "where" and len(args) > 1 else args


def recorder_in(values: Any) -> Any:
    """Returns the recorder of the first symbol in a function's arguments; torch found one there."""
    for value in values:
        if isinstance(value, Operand):
            return value.recorder
        if isinstance(value, (tuple, list)) and any(isinstance(each, Operand) for each in value):
            return recorder_in(value)
    raise Refused("a symbolic value among a torch function's keywords")
