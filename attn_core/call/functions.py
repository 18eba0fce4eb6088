"""The mask and score functions of a call: their aux arrays among its tensors, their checks and their values.

``mask_mod(b, h, q, k, *aux)`` says whether query q sees key k. ``score_mod(score, b, h, q, k, *aux)`` maps a scaled and
softcapped score to another one, before bias and ALiBi; a score of -inf hides its pair. b and h count batch rows and
query heads. q and k count from 0 in the whole row, in packed rows through all documents. A spec holds both functions as
expressions. These name no array: lookups go by number, in the arrays that ``AUX`` names in ``Inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import numpy as np

from attn_core.call.kinds import is_number
from attn_core.call.tensors import Array
from attn_core.errors import ShapeError, SpecError, shown
from attn_core.expressions.building import TRUE
from attn_core.expressions.derivatives import ZERO, derivative, rounding
from attn_core.expressions.on_numpy import block_indices, evaluate_numpy
from attn_core.expressions.properties import aux_numbers, check_aux, kind_of_dtype, uses
from attn_core.expressions.symbols import place_of
from attn_core.expressions.tracing import TracedFunction, trace_mask, trace_score
from attn_core.expressions.tree import Expression, from_rows, nodes

AUX = ("aux0", "aux1", "aux2", "aux3")
"""The fields of ``Inputs`` that hold the aux arrays, in order."""
DAUX = ("daux0", "daux1", "daux2", "daux3")
"""The fields of ``Gradients`` that hold their gradients."""
KINDS = {"mask_mod": "bool", "score_mod": "float"}
"""What each function gives."""
FUNCTIONS = (*KINDS, "aux")
"""The arguments of a call that say its functions."""


TANH_ERROR = {"float16": 16.0, "bfloat16": 16.0}
"""The absolute error of tanh in a score function, in units of the roundoff. Kernels in half precision use the GPU's
``tanh.approx``: bounds take 8 roundoffs of float32 for each unit, so this is 2**-17, as for softcap."""

T = TypeVar("T")
NO_FUNCTIONS = None, None, ()
Function = Callable[..., object] | TracedFunction
Traced = tuple[Expression | None, Expression | None, tuple[Any, ...]]
"""The expressions of mask_mod and score_mod, and their arrays."""
_NEUTRAL = (TRUE, Expression("score", "float"))


def are_given(functions: tuple[object, object, object]) -> bool:
    """Returns whether a call has mask_mod, score_mod or aux. An array has no truth value, so nothing is compared."""
    mask_mod, score_mod, aux = functions
    return not (mask_mod is None and score_mod is None and type(aux) is tuple and not aux)


def trace(mask_mod: Function | None, score_mod: Function | None, aux: object) -> Traced:
    """Returns the expressions of a call's functions and their arrays: those of aux, then those that they captured.

    A mask function that hides nothing and a score function that changes nothing are None.

    Args:
        mask_mod, score_mod: functions, what ``trace_mask`` and ``trace_score`` returned for them, or None.
        aux: a tuple or list of arrays.

    Raises:
        ExpressionError: for a function that cannot become an expression; SpecError: for too many arrays.
    """
    if not isinstance(aux, (tuple, list)):
        raise SpecError(f"aux={shown(aux)}: expected a tuple of arrays")
    arrays: list[Any] = list(aux)
    trees: list[Expression | None] = []
    for name, function, tracer in (("mask_mod", mask_mod, trace_mask), ("score_mod", score_mod, trace_score)):
        if function is None:
            trees.append(None)
            continue
        if isinstance(function, TracedFunction):
            traced = function
            if traced.tree.kind != KINDS[name]:
                raise SpecError(f"{name}: expected a function that gives a {KINDS[name]}, got {traced.tree.kind}")
            if traced.aux_count != len(aux):
                raise SpecError(
                    f"aux: expected the {traced.aux_count} arrays that {name} was traced with, got {len(aux)}"
                )
        else:
            traced = tracer(function, aux)
        trees.append(None if traced.tree in _NEUTRAL else _renumbered(traced, arrays))
    if aux and mask_mod is None and score_mod is None:
        raise SpecError(f"aux: expected mask_mod or score_mod with it, got {len(aux)} arrays alone")
    if all([tree is None for tree in trees]):  # Dynamo compares no constant expressions
        return NO_FUNCTIONS
    if len(arrays) > len(AUX):
        raise SpecError(f"aux: expected at most {len(AUX)} arrays, captured ones included, got {len(arrays)}")
    return trees[0], trees[1], tuple(arrays)


def _renumbered(traced: TracedFunction, arrays: list[Any]) -> Expression:
    """Appends the captured arrays to the call's, and returns the expression with their numbers."""
    numbers = {traced.aux_count + number: place_of(array, arrays) for number, array in enumerate(traced.captured)}
    return traced.tree if all(old == new for old, new in numbers.items()) else renumbered(traced.tree, numbers)


def renumbered(tree: Expression, numbers: dict[int, int]) -> Expression:
    """Returns an expression whose lookups go to other arrays: ``numbers`` has the new number of each that changes."""
    rows = [
        (op, kind, numbers.get(value, value) if op == "lookup" else value, operands)  # type: ignore[arg-type]
        for op, kind, value, operands in tree.rows
    ]
    return from_rows(tuple(rows))


def check_functions(spec: Any) -> None:
    """Checks the functions of a spec, and that its aux arrays fit them.

    Raises:
        SpecError: naming the field. ExpressionError: naming the array.
    """
    _check_aux_gradients(spec)
    if spec.aux == () and not has_functions(spec):
        return
    if not isinstance(spec.aux, tuple) or len(spec.aux) > len(AUX):
        raise SpecError(f"aux={shown(spec.aux)}: expected at most {len(AUX)} pairs (shape, dtype)")
    for name, kind in KINDS.items():
        tree = getattr(spec, name)
        if tree is None:
            continue
        if not isinstance(tree, Expression) or tree.kind != kind:
            raise SpecError(f"{name}={shown(tree)}: expected an expression that gives a {kind}, or None")
        check_aux(tree, spec.aux)
        _check_not_empty(name, tree, spec)
    if spec.aux and spec.mask_mod is None and spec.score_mod is None:
        raise SpecError("aux: expected mask_mod or score_mod with it, got none")
    if (spec.mask_mod is not None or spec.score_mod is not None) and spec.paged is not None:
        raise SpecError("mask_mod, score_mod: expected none with keys and values in pages")
    for number, entry in enumerate(spec.aux):
        if len(entry.shape) > 4:
            raise ShapeError(f"aux[{number}]: expected at most 4 axes, got {list(entry.shape)}")


def _check_not_empty(name: str, tree: Expression, spec: Any) -> None:
    """Raises ShapeError if a function reads an array without elements, in a call that has pairs."""
    for number in aux_numbers(tree):
        shape = list(spec.aux[number].shape)
        if any(map(_is_zero, shape)) and not any(map(_is_zero, (spec.batch, spec.q_len, spec.kv_len))):
            raise ShapeError(f"aux[{number}]: expected at least one element, because {name} reads it, got {shape}")


def _is_zero(size: object) -> bool:
    return is_number(size) and size == 0  # a symbol may be any number


def _check_aux_gradients(spec: Any) -> None:
    numbers = spec.aux_gradients
    if numbers == ():
        return
    read = () if spec.score_mod is None else aux_numbers(spec.score_mod)
    if not isinstance(numbers, tuple) or tuple(n for n in read if n in numbers) != numbers:
        raise SpecError(f"aux_gradients={shown(numbers)}: expected numbers of arrays that score_mod reads, ascending")
    for number in numbers:
        if kind_of_dtype(spec.aux[number].dtype) != "float":
            raise SpecError(f"aux_gradients: expected arrays of floats, got aux[{number}] of {spec.aux[number].dtype}")
    if not spec.needs_backward:
        raise SpecError("aux_gradients: expected needs_backward=True with it")


def reads(spec: Any, *names: str) -> bool:
    """Returns whether a function of the call reads one of "b", "h", "q", "k": then a part of it must keep its place."""
    trees = (spec.mask_mod, spec.score_mod)
    return any(tree is not None and uses(tree) & set(names) for tree in trees)


def has_functions(spec: Any) -> bool:
    """Returns whether the call has a mask or a score function."""
    return spec.mask_mod is not None or spec.score_mod is not None


def by_row(spec: Any) -> tuple[int, ...] | None:
    """Returns the numbers of the aux arrays whose first axis is the batch, if b has no other use in the functions.

    A part of the batch then computes the same with its part of these arrays. None if a function reads b in another way:
    a part must keep its place.
    """
    return _by_row(spec.mask_mod, spec.score_mod, spec.batch, tuple([entry.shape for entry in spec.aux]))


@lru_cache(maxsize=1024)
def _by_row(
    mask: Expression | None, score: Expression | None, batch: int, shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, ...] | None:
    """``by_row`` by what it depends on, because the functions of a call are the same at every step."""
    trees = [tree for tree in (mask, score) if tree is not None]
    first, other = set[int](), set[int]()  # the arrays that b indexes first, and all others
    for tree in trees:
        for row in tree.rows:
            is_row = [tree.rows[operand].op == "b" for operand in row.operands]
            if row.op == "lookup":
                (first if is_row[:1] == [True] else other).add(int(row.value or 0))
                is_row = is_row[1:]
            if any(is_row):
                return None
        if tree.rows[-1].op == "b":  # the function returns b itself
            return None
    fits = all(shapes[number][0] == batch for number in first)
    return tuple(sorted(first)) if fits and not first & other else None


def aux_of(inputs: Any) -> tuple[Any, ...]:
    """Returns the aux arrays among a call's tensors."""
    arrays = inputs.aux0, inputs.aux1, inputs.aux2, inputs.aux3
    return tuple([array for array in arrays if array is not None])


def named(aux: Sequence[T]) -> dict[str, T]:
    """Returns aux arrays by their fields in ``Inputs``."""
    return dict(zip(AUX, aux, strict=False))


def listed(numbers: Sequence[int]) -> str:
    """Returns numbers of aux arrays as an error names them."""
    return ", ".join(f"aux[{number}]" for number in numbers)


@lru_cache(maxsize=256)
def slope(tree: Expression) -> Expression:
    """Returns the derivative of a score expression by the score; cached."""
    return derivative(tree)


@lru_cache(maxsize=256)
def lookup_slopes(tree: Expression, numbers: tuple[int, ...]) -> tuple[tuple[Expression, Expression], ...]:
    """Returns (lookup, derivative of a score expression by it) for each lookup in the arrays of these numbers; cached.

    Lookups on which the value does not depend are left out: those of an index alone.
    """
    lookups = [node for node in nodes(tree) if node.op == "lookup" and node.value in numbers and node.kind == "float"]
    pairs = [(node, derivative(tree, node)) for node in lookups]
    return tuple((node, slope) for node, slope in pairs if slope != ZERO)


def seen_by_function(spec: Any, aux: Sequence[Array]) -> np.ndarray:
    """Returns what the mask function shows: bool ``[batch, heads, q_len, kv_len]``; the definition."""
    return evaluate_numpy(spec.mask_mod, _indices(spec), aux=aux)


class Scored(NamedTuple):
    """A score function at the scores of a call, float64; the definition.

    Attributes:
        values: what the function returns; slopes, bends: its first two derivatives by the score.
        rounding, slope_rounding: the rounding errors of the values and of the slopes, in units of the roundoff.
    """

    values: np.ndarray
    slopes: np.ndarray
    bends: np.ndarray
    rounding: np.ndarray
    slope_rounding: np.ndarray


def scored(spec: Any, scores: np.ndarray, aux: Sequence[Array]) -> Scored:
    """Evaluates the score function at the scores."""
    first = slope(spec.score_mod)
    tanh = TANH_ERROR.get(spec.dtype, 0.0)
    trees = (spec.score_mod, first, slope(first), rounding(spec.score_mod, tanh), rounding(first, tanh))
    *values, error, slope_error = (evaluate_numpy(tree, _indices(spec), scores, aux) for tree in trees)
    # NaN is 0 times an infinite error: the operation does not depend on that operand here.
    return Scored(*values, *(np.where(np.isnan(part), 0.0, part) for part in (error, slope_error)))


def _indices(spec: Any) -> tuple[np.ndarray, ...]:
    return block_indices(spec.batch, spec.num_heads, spec.q_len, spec.kv_len)
