"""The values that a function gets while it is traced: symbols instead of numbers, and arrays that symbols index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from attn_core.errors import shown
from attn_core.expressions.building import Refused, build, constant
from attn_core.expressions.operators import Operand
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
