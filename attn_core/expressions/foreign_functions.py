"""torch's and numpy's functions and methods on symbols, by their names."""

from __future__ import annotations

from typing import Any

from attn_core.expressions.building import Refused, build, cast, power
from attn_core.expressions.operations import OPERATIONS
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
    "exp": ("exp",),
    "tanh": ("tanh",),
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
_CASTS: dict[str, Kind] = {"float": "float", "double": "float", "int": "int", "long": "int"}
_DTYPES: dict[str, Kind] = {"float32": "float", "float64": "float", "int32": "int", "int64": "int", **_CASTS}
"""The name of a dtype -> the kind that a cast to it gives. Not the half dtypes: such a cast would round."""

METHODS = {*NAMES, *_SWAPPED, *_NEGATED, *_CASTS, "to", "type", "astype", "pow", "clamp", "clip"}
"""What a symbol has as methods, too, such as ``symbol.abs()``."""


def call_foreign(recorder: Any, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Returns the symbol of a function of torch or numpy, or of a method such as ``symbol.abs()``.

    Args:
        recorder: of the trace.
        name: of the function; double underscores around it do not count.
        args, options: the function's.

    Raises:
        Refused: for another function, or for options that change what it computes.
    """
    plain = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if plain == "getitem":
        array, index = args
        return recorder.array(array)[index]
    if plain in ("clamp", "clip"):
        return recorder.wrap(_clamped(recorder, name, args, options))
    if options:
        raise Refused(f"{name}(...) with the option {', '.join(options)}")
    if plain in ("to", "type", "astype") and len(args) == 2:
        return recorder.wrap(cast(recorder.tree(args[0]), _kind_named(args[1])))
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


def _kind_named(dtype: Any) -> Kind:
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise Refused(f"a cast to {name}: a cast takes {', '.join(_DTYPES)}")
    return _DTYPES[name]
