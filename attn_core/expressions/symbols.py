"""The values that a function gets while it is traced: symbols instead of numbers, and arrays that symbols index.

``Operand`` has what both can do: Python's operators, and torch's and numpy's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Never, TypeVar

import numpy as np

from attn_core.errors import shown
from attn_core.expressions.building import Refused, build, cast, constant, power
from attn_core.expressions.properties import kind_of_dtype
from attn_core.expressions.tree import OPERATIONS, Expression, Kind

T = TypeVar("T")


class _NoAttribute(Refused, AttributeError):
    """An AttributeError, so that ``hasattr`` of a symbol works."""


def _no_value(what: str, instead: str) -> Any:
    def refuse(self: Any, *arguments: object, **options: object) -> Never:
        raise Refused(f"{what}: a symbolic value has none; {instead}")

    return refuse


def _operator(op: str) -> tuple[Callable[[Operand, object], Symbol], Callable[[Operand, object], Symbol]]:
    """Returns the method of an operator, and that of the same operator with its operands exchanged."""

    def forward(self: Operand, other: object) -> Symbol:
        return self._apply(op, self, other)

    def exchanged(self: Operand, other: object) -> Symbol:
        return self._apply(op, other, self)

    return forward, exchanged


class Operand:
    """A symbol or an array. Its operators give symbols, or refuse.

    Attributes:
        recorder: of the trace that it belongs to.
        kind: of the value, or of the array's elements.
        device: None, which torch reads as its default; a symbol has none.
    """

    recorder: Recorder
    kind: Kind
    device = None

    @property
    def dtype(self) -> KindAsDtype:
        """What others may be cast to: ``x.to(score.dtype)``."""
        return KindAsDtype(self.kind)

    def _apply(self, op: str, *values: object) -> Symbol:
        """Returns the symbol of an operation on values, of which this is one."""
        return self.recorder.symbol(op, *map(self.recorder.tree, values))

    __add__, __radd__ = _operator("add")
    __sub__, __rsub__ = _operator("subtract")
    __mul__, __rmul__ = _operator("multiply")
    __truediv__, __rtruediv__ = _operator("divide")
    __floordiv__, __rfloordiv__ = _operator("floor_divide")
    __mod__, __rmod__ = _operator("remainder")
    __lshift__, __rlshift__ = _operator("shift_left")
    __rshift__, __rrshift__ = _operator("shift_right")
    __and__, __rand__ = _operator("and")
    __or__, __ror__ = _operator("or")
    __lt__, __gt__ = _operator("less")  # a > b is b < a
    __le__, __ge__ = _operator("less_equal")

    def __pow__(self, exponent: object) -> Symbol:
        return self.recorder.wrap(power(self.recorder.tree(self), exponent))

    def __rpow__(self, base: object) -> Never:
        raise Refused("a symbolic exponent: write exp2(x), or exp(x * log_of_base) with a constant")

    def __neg__(self) -> Symbol:
        return self._apply("negative", self)

    def __pos__(self) -> Symbol:
        return self.recorder.wrap(self.recorder.tree(self))

    def __abs__(self) -> Symbol:
        return self._apply("abs", self)

    def __eq__(self, other: object) -> Any:
        return self._apply("equal", self, other)

    def __ne__(self, other: object) -> Any:
        return ~self._apply("equal", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __xor__(self, other: object) -> Symbol:
        return call_foreign(self.recorder, "logical_xor", (self, other), {})

    __rxor__ = __xor__

    def __invert__(self) -> Symbol:
        return self._apply("not", self)

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
    def __torch_function__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", str(function))
        if type(function).__name__ == "method_descriptor":
            args = _in_order(name, args)
        return call_foreign(recorder_in(args), name, args, kwargs or {})

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return call_foreign(self.recorder, name, inputs, options)

    def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Any:
        return call_foreign(self.recorder, function.__name__, args, kwargs)


def _in_order(name: str, args: tuple[T, ...]) -> tuple[T, ...]:
    """Returns a method's arguments in the order of the function: ``x.where(condition, y)`` has the condition second."""
    return (args[1], args[0], *args[2:]) if name == "where" and len(args) > 1 else args


def recorder_in(values: Iterable[object]) -> Recorder:
    """Returns the recorder of the first symbol in a function's arguments; torch found one there."""
    for value in values:
        if isinstance(value, Operand):
            return value.recorder
        if isinstance(value, (tuple, list)) and any(isinstance(each, Operand) for each in value):
            return recorder_in(value)
    raise Refused("a symbolic value among a torch function's keywords")


NAMES = {name: op for op, operation in OPERATIONS.items() for name in operation.names}
"""The name of a function -> the operation that it is."""
_SWAPPED = {"gt": "less", "greater": "less", "ge": "less_equal", "greater_equal": "less_equal"}
_NEGATED = {"ne": "equal", "not_equal": "equal", "logical_xor": "equal", "bitwise_xor": "equal", "xor": "equal"}
_CASTS: dict[str, Kind] = {"float": "float", "double": "float", "int": "int", "long": "int", "bool": "bool"}
_DTYPES: dict[str, Kind] = {"float32": "float", "float64": "float", "int32": "int", "int64": "int", **_CASTS}
"""The name of a dtype -> the kind that a cast to it gives. Not the half dtypes: such a cast would round."""
_TO_KIND = ("to", "type", "astype", "type_as")
_FILLED = {"zeros": 0, "ones": 1, "full": None, "tensor": None}
"""``new_zeros``, ``zeros_like`` and so on -> the number; None if it is an argument."""
_FILLS = {f"new_{name}" for name in _FILLED} | {f"{name}_like" for name in ("zeros", "ones", "full")}

METHODS = {
    *NAMES,
    *_SWAPPED,
    *_NEGATED,
    *_CASTS,
    *_TO_KIND,
    *_FILLS,
    "pow",
    "clamp",
    "clip",
    "masked_fill",
}
"""What a symbol has as methods, too, such as ``symbol.abs()``."""
_KEYWORDS = {"to": ("dtype",), "astype": ("dtype",), "masked_fill": ("mask", "value")}
"""The names of arguments behind the first one."""


@dataclass(frozen=True, eq=False)
class KindAsDtype:
    """The dtype of a symbol, to which others may be cast. Which dtype it is, only the call knows.

    Attributes:
        name: the symbol's kind.
    """

    name: Kind

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KindAsDtype):
            raise Refused(f"a comparison of {self} with {other}: only the call knows the dtype")
        return self.name == other.name

    def __repr__(self) -> str:
        return f"the dtype of a symbolic {self.name}"


def call_foreign(recorder: Recorder, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # noqa: C901
    """Returns the symbol of a function of torch or numpy, or of a method such as ``symbol.abs()``.

    Double underscores around the name do not count.

    Raises:
        Refused: for another function, or for options that change what it computes.
    """
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name.removeprefix("special_")
    plain = "sigmoid" if plain == "expit" else plain
    if plain == "getitem":
        array, index = args
        return recorder.array(array)[index]
    if plain in ("clamp", "clip"):
        return recorder.wrap(_clamped(recorder, name, args, options))
    if plain in _FILLS:
        return recorder.wrap(_filled(recorder, plain, args, options))
    known = [keyword for keyword in _KEYWORDS.get(plain, ()) if keyword in options]
    args, options = (*args, *map(options.get, known)), {each: options[each] for each in options if each not in known}
    if options:
        raise Refused(f"{name}(...) with the option {', '.join(options)}")
    if plain in _TO_KIND and len(args) == 2:
        return recorder.wrap(cast(recorder.tree(args[0]), _kind_named(args[1])))
    if plain == "masked_fill" and len(args) == 3:
        tree, condition, value = (recorder.tree(each) for each in args)
        return recorder.wrap(build("where", condition, cast(value, tree.kind), tree))
    if plain in _CASTS and len(args) == 1:
        return recorder.wrap(cast(recorder.tree(args[0]), _CASTS[plain]))
    if plain in ("pow", "power") and len(args) == 2:
        return recorder.wrap(power(recorder.tree(args[0]), args[1]))
    if plain in _SWAPPED:
        return recorder.wrap(_built(name, _SWAPPED[plain], [recorder.tree(value) for value in args][::-1]))
    trees = [recorder.tree(value) for value in args]
    if plain in _NEGATED:
        if plain.endswith("xor") and {tree.kind for tree in trees} != {"bool"}:
            raise Refused("^ of ints: it takes bools")
        return recorder.wrap(build("not", _built(name, _NEGATED[plain], trees)))
    if plain not in NAMES:
        raise Refused(f"{name}(...)")
    return recorder.wrap(_built(name, NAMES[plain], trees))


def _built(name: str, op: str, trees: list[Expression]) -> Expression:
    if len(trees) != OPERATIONS[op].arity:
        raise Refused(f"{name}(...) with {len(trees)} arguments")
    return build(op, *trees)


def _clamped(recorder: Recorder, name: str, args: tuple[object, ...], options: dict[str, Any]) -> Expression:
    """torch's clamp and numpy's clip: ``minimum(maximum(x, min), max)``, either of them optional."""
    limits = dict(zip(("min", "max"), args[1:], strict=False)) | options
    if len(args) > 3 or not args or set(limits) - {"min", "max"}:
        raise Refused(f"{name}(...) with such arguments")
    tree = recorder.tree(args[0])
    for limit, op in (("min", "maximum"), ("max", "minimum")):
        if limits.get(limit) is not None:
            tree = build(op, tree, recorder.tree(limits[limit]))
    return tree


def _filled(recorder: Recorder, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Expression:
    """A constant of the kind of a symbol, or of a dtype: ``symbol.new_ones(())``, ``full_like(symbol, 2.0)``."""
    fill = _FILLED[name.removeprefix("new_").removesuffix("_like")]
    names = ["size"] * (name in ("new_zeros", "new_ones", "new_full")) + ["fill_value"] * (fill is None)
    given = dict(zip(names, args[1:], strict=False)) | options
    if len(args) > 1 + len(names) or set(given) - {*names, "dtype", "device"} or given.get("size", ()) not in ((), []):
        raise Refused(f"{name}(...) with such arguments: a symbolic value is one number, of size ()")
    tree = recorder.tree(args[0])
    dtype = given.get("dtype")
    value = recorder.tree(given["fill_value"] if fill is None else fill)
    return cast(value, tree.kind if dtype is None else _kind_named(dtype))


def _kind_named(dtype: Any) -> Kind:
    if hasattr(dtype, "recorder"):  # a symbol, whose kind is asked for
        dtype = dtype.dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise Refused(f"a cast to {name}: a cast takes {', '.join(_DTYPES)}")
    return _DTYPES[name]


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
        return Array(self, self.aux + place_of(array, self.captured), tuple(array.shape), kind)

    def tree(self, value: object) -> Expression:
        """Returns the expression of an operand: a symbol, a Python or numpy number, or an array without axes.

        Raises:
            Refused: for anything else.
        """
        if isinstance(value, Array):
            raise Refused(f"{value} as a number: it needs an index for each axis, such as array[b, q]")
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


def place_of(array: T, arrays: list[T]) -> int:
    """Returns the place of an array in a list, by identity; appends it if it is not there."""
    for place, other in enumerate(arrays):
        if other is array:
            return place
    arrays.append(array)
    return len(arrays) - 1


class Symbol(Operand):
    """A value that is known when the kernel runs: an expression with Python's operators.

    Attributes:
        recorder: of the trace that it belongs to.
        tree: the expression; kind: its kind.
    """

    def __init__(self, recorder: Recorder, tree: Expression) -> None:
        self.recorder = recorder
        self.tree = tree
        self.kind = tree.kind

    def __getitem__(self, index: object) -> Never:
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
        self, recorder: Recorder, number: int, shape: Sequence[int], kind: Kind, indices: tuple[Expression, ...] = ()
    ) -> None:
        self.recorder, self.number, self.kind, self.indices = recorder, number, kind, indices
        self.shape = tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes that have no index yet."""
        return len(self.shape)

    def at(self, indices: tuple[object, ...]) -> Expression:
        """Returns the lookup by as many indices as there are axes.

        Raises:
            Refused: for a slice or another index that is no int, or a constant that is outside.
        """
        places = tuple(self._place(index, axis) for axis, index in enumerate(indices))
        return Expression("lookup", self.kind, self.indices + places, self.number)

    def _place(self, index: object, axis: int) -> Expression:
        """Returns an index of an array as an expression; refuses what is no int, and a constant that is outside."""
        if isinstance(index, slice) or index is None or index is Ellipsis or isinstance(index, (list, tuple)):
            raise Refused(f"the index {shown(index)} of {self}: indices are ints or symbols, no slices")
        place = self.recorder.tree(index)
        if place.kind != "int":
            raise Refused(f"an index of kind {place.kind} of {self}: indices are ints; write to_int(...) for a bool")
        size = self.shape[axis]
        if place.op == "constant" and isinstance(size, int) and not -size <= int(place.value or 0) < size:
            raise Refused(f"the index {place.value} of axis {axis} of {self}: it is outside")
        return place

    def __getitem__(self, index: object) -> Symbol | Array:
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
