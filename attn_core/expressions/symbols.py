"""The values that a function gets while it is traced: symbols instead of numbers, and arrays that symbols index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_core.errors import shown
from attn_core.expressions.building import Refused, build, constant, power
from attn_core.expressions.foreign_functions import METHODS, call_foreign
from attn_core.expressions.properties import kind_of_dtype
from attn_core.expressions.tree import Expression, Kind

MAX_OPERATIONS = 4096
"""The most operations of one function: a kernel contains all of them."""


class Recorder:
    """What one trace collects.

    Attributes:
        aux: the number of arrays that the caller passes.
        captured: the other arrays that the function indexes, each once; their numbers follow the caller's.
    """

    def __init__(self, aux: int) -> None:
        self.aux = aux
        self.captured: list[Any] = []
        self._operations = 0

    def symbol(self, op: str, *operands: Expression) -> Symbol:
        """Returns the symbol of an operation.

        Raises:
            Refused: if the operation does not take such operands, or the function has too many operations.
        """
        return self.wrap(build(op, *operands))

    def wrap(self, tree: Expression) -> Symbol:
        """Returns the symbol of an expression, and counts it.

        Raises:
            Refused: if the function has too many operations.
        """
        self._operations += 1
        if self._operations > MAX_OPERATIONS:
            raise Refused(f"more than {MAX_OPERATIONS} operations")
        return Symbol(self, tree)

    def array(self, array: Any) -> Array:
        """Returns an array that the function captured; it is kept by identity.

        Raises:
            Refused: for a dtype that has no kind.
        """
        kind = kind_of_dtype(getattr(array, "dtype", None))
        if kind is None:
            raise Refused(f"an array of dtype {getattr(array, 'dtype', None)}: lookups take bool, int32 and floats")
        place = next((i for i, other in enumerate(self.captured) if other is array), len(self.captured))
        if place == len(self.captured):
            self.captured.append(array)
        return Array(self, self.aux + place, tuple(array.shape), kind)

    def tree(self, value: Any) -> Expression:
        """Returns the expression of an operand: a symbol, a Python or numpy number, or an array without axes.

        Raises:
            Refused: for anything else.
        """
        if isinstance(value, Array):
            raise Refused(f"{value} as a number: index it with {len(value.shape)} ints, such as array[q]")
        if isinstance(value, Symbol):
            if value.recorder is not self:
                raise Refused("a symbolic value of another function")
            return value.tree
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, (bool, int, float)):
            return constant(value)
        if getattr(value, "shape", None) == () and kind_of_dtype(getattr(value, "dtype", None)):
            return self.array(value).at(())
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            raise Refused(f"{shown(value)} as a number: pass it in aux and index it, or write lookup(array, q)")
        raise Refused(f"{shown(value)} ({type(value).__name__}) as a number")


class _NoAttribute(Refused, AttributeError):
    """An AttributeError, so that ``hasattr`` of a symbol works."""


def _no_value(what: str, instead: str) -> Any:
    def refuse(self: Any, *arguments: Any, **options: Any) -> Any:
        raise Refused(f"{what}: a symbolic value has none; {instead}")

    return refuse


class Operand:
    """Python's operators, and torch's and numpy's functions, on what a traced function gets."""

    recorder: Recorder

    def _(self, op: str, *values: Any) -> Symbol:
        return self.recorder.symbol(op, *map(self.recorder.tree, values))

    def __add__(self, other: Any) -> Symbol:
        return self._("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return self._("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return self._("subtract", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._("subtract", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return self._("multiply", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return self._("multiply", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return self._("divide", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self._("divide", other, self)

    def __floordiv__(self, other: Any) -> Symbol:
        return self._("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Symbol:
        return self._("floor_divide", other, self)

    def __mod__(self, other: Any) -> Symbol:
        return self._("remainder", self, other)

    def __rmod__(self, other: Any) -> Symbol:
        return self._("remainder", other, self)

    def __pow__(self, exponent: Any) -> Symbol:
        return self.recorder.wrap(power(self.recorder.tree(self), exponent))

    def __rpow__(self, base: Any) -> Symbol:
        raise Refused("a symbolic exponent: write exp(x * log_of_base) with a constant")

    def __neg__(self) -> Symbol:
        return self._("negative", self)

    def __pos__(self) -> Symbol:
        return Symbol(self.recorder, self.recorder.tree(self))

    def __abs__(self) -> Symbol:
        return self._("abs", self)

    def __lt__(self, other: Any) -> Symbol:
        return self._("less", self, other)

    def __le__(self, other: Any) -> Symbol:
        return self._("less_equal", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return self._("less", other, self)

    def __ge__(self, other: Any) -> Symbol:
        return self._("less_equal", other, self)

    def __eq__(self, other: Any) -> Any:
        return self._("equal", self, other)

    def __ne__(self, other: Any) -> Any:
        return ~self._("equal", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Symbol:
        return self._("and", self, other)

    def __rand__(self, other: Any) -> Symbol:
        return self._("and", other, self)

    def __or__(self, other: Any) -> Symbol:
        return self._("or", self, other)

    def __ror__(self, other: Any) -> Symbol:
        return self._("or", other, self)

    def __xor__(self, other: Any) -> Symbol:
        return call_foreign(self.recorder, "logical_xor", (self, other), {})

    __rxor__ = __xor__

    def __invert__(self) -> Symbol:
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
        return call_foreign(_recorder_in(args), name, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return call_foreign(self.recorder, name, inputs, options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return call_foreign(self.recorder, function.__name__, args, kwargs)


class Symbol(Operand):
    """A value that is known when the kernel runs: an expression with Python's operators.

    Attributes:
        recorder: of the trace that it belongs to.
        tree: the expression.
    """

    def __init__(self, recorder: Recorder, tree: Expression) -> None:
        self.recorder = recorder
        self.tree = tree

    def __getitem__(self, index: Any) -> Any:
        raise Refused("an index into a symbolic value: it is one number, not an array")

    def __repr__(self) -> str:
        return f"Symbol({self.tree})"


class Array(Operand):
    """An aux array, or one that the function captured; ``array[i, j]`` looks a number up.

    Attributes:
        recorder: of the trace that it belongs to.
        number: its number in aux.
        shape: of the axes that have no index yet.
        kind: of its elements.
        indices: those that it already has: ``array[b]`` has one, and takes the others later.
    """

    def __init__(
        self, recorder: Recorder, number: int, shape: Sequence[Any], kind: Kind, indices: tuple[Expression, ...] = ()
    ) -> None:
        self.recorder, self.number, self.kind, self.indices = recorder, number, kind, indices
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes that have no index yet."""
        return len(self.shape)

    def at(self, indices: tuple[Any, ...]) -> Expression:
        """Returns the lookup by as many indices as there are axes.

        Raises:
            Refused: for a slice or another index that is no int, or a constant that is outside.
        """
        places = tuple(self._place(index, axis) for axis, index in enumerate(indices))
        return Expression("lookup", self.kind, self.indices + places, self.number)

    def _place(self, index: Any, axis: int) -> Expression:
        if isinstance(index, slice) or index is None or index is Ellipsis or isinstance(index, (list, tuple)):
            raise Refused(f"the index {shown(index)} of {self}: indices are ints or symbols, no slices")
        place = self.recorder.tree(index)
        if place.kind != "int":
            raise Refused(f"an index of kind {place.kind} of {self}: indices are ints; write to_int(...) for a bool")
        size = self.shape[axis]
        if place.op == "constant" and isinstance(size, int) and not -size <= int(place.value or 0) < size:
            raise Refused(f"the index {place.value} of axis {axis} of {self}: it is outside")
        return place

    def __getitem__(self, index: Any) -> Any:
        indices = index if isinstance(index, tuple) else (index,)
        if len(indices) > len(self.shape):
            raise Refused(f"{len(indices)} indices of {self}")
        if len(indices) == len(self.shape):
            return Symbol(self.recorder, self.at(indices))
        places = self.at(indices).operands
        return Array(self.recorder, self.number, self.shape[len(indices) :], self.kind, places)

    def __repr__(self) -> str:
        return f"aux[{self.number}] of shape {list(self.shape)}"

    __str__ = __repr__


def _in_order(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns a method's arguments in the order of the function: ``x.where(condition, y)`` has the condition second."""
    return (args[1], args[0], *args[2:]) if name == "where" and len(args) > 1 else args


def _recorder_in(values: Any) -> Recorder:
    """Returns the recorder of the first symbol in a function's arguments; torch found one there."""
    for value in values:
        if isinstance(value, Operand):
            return value.recorder
        if isinstance(value, (tuple, list)) and any(isinstance(each, Operand) for each in value):
            return _recorder_in(value)
    raise Refused("a symbolic value among a torch function's keywords")
