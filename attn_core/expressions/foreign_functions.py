"""torch's and numpy's functions and methods on symbols, by their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.expressions.building import Refused, build, cast, power
from attn_core.expressions.operations import OF_FLOATS, OPERATIONS
from attn_core.expressions.tree import Expression, Kind

_OPERATIONS = {
    "add": ("add",),
    "subtract": ("sub", "subtract"),
    "multiply": ("mul", "multiply"),
    "divide": ("div", "divide", "true_divide", "truediv"),
    "floor_divide": ("floor_divide", "floordiv"),
    "remainder": ("remainder", "mod"),
    "negative": ("neg", "negative"),
    "abs": ("abs", "absolute"),
    "minimum": ("minimum",),
    "maximum": ("maximum",),
    "shift_left": ("lshift", "left_shift", "bitwise_left_shift"),
    "shift_right": ("rshift", "right_shift", "bitwise_right_shift"),
    **{name: (name,) for name in OF_FLOATS},
    "less": ("lt", "less"),
    "less_equal": ("le", "less_equal"),
    "equal": ("eq", "equal"),
    "and": ("and", "logical_and", "bitwise_and"),
    "or": ("or", "logical_or", "bitwise_or"),
    "not": ("invert", "logical_not", "bitwise_not"),
    "where": ("where",),
}
NAMES = {name: op for op, names in _OPERATIONS.items() for name in names}
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
    *(*NAMES, *_SWAPPED, *_NEGATED, *_CASTS, *_TO_KIND, *_FILLS),
    *("pow", "clamp", "clip", "masked_fill"),
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


def call_foreign(recorder: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:  # noqa: C901
    """Returns the symbol of a function of torch or numpy, or of a method such as ``symbol.abs()``.

    Args:
        recorder: of the trace.
        name: of the function; double underscores around it do not count.
        args, options: the function's.

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


def _clamped(recorder: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Expression:
    """torch's clamp and numpy's clip: ``minimum(maximum(x, min), max)``, either of them optional."""
    limits = dict(zip(("min", "max"), args[1:], strict=False)) | options
    if len(args) > 3 or not args or set(limits) - {"min", "max"}:
        raise Refused(f"{name}(...) with such arguments")
    tree = recorder.tree(args[0])
    for limit, op in (("min", "maximum"), ("max", "minimum")):
        if limits.get(limit) is not None:
            tree = build(op, tree, recorder.tree(limits[limit]))
    return tree


def _filled(recorder: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Expression:
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
