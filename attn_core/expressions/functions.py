"""The functions to write masks and scores with: those of symbols, beside Python's operators, and ready-made ones.

A ready-made function is plain Python on symbols, as a caller's would be. It takes aux arrays and ignores them, so that
it combines with functions that need some. Arrays that it is made of become operands of the call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from attn_core.errors import shown
from attn_core.expressions.building import cast
from attn_core.expressions.symbols import Array, Operand, Recorder, Symbol
from attn_core.expressions.tree import ExpressionError


def where(condition: object, a: object, b: object) -> Symbol:
    """Returns ``a`` where the condition is True, else ``b``.

    Args:
        condition: a bool symbol or a bool.
        a, b: symbols or numbers; an int beside a float becomes a float.
    """
    return _call("where", condition, a, b)


def minimum(a: object, b: object) -> Symbol:
    """Returns the lesser of two numbers; NaN if one is NaN."""
    return _call("minimum", a, b)


def maximum(a: object, b: object) -> Symbol:
    """Returns the greater of two numbers; NaN if one is NaN."""
    return _call("maximum", a, b)


def exp(x: object) -> Symbol:
    """Returns the exponential of a number, a float."""
    return _call("exp", x)


def exp2(x: object) -> Symbol:
    """Returns 2 to the power of a number, a float."""
    return _call("exp2", x)


def expm1(x: object) -> Symbol:
    """Returns ``exp(x) - 1``, a float with all digits near 0."""
    return _call("expm1", x)


def log(x: object) -> Symbol:
    """Returns the natural logarithm of a number, a float; NaN below 0."""
    return _call("log", x)


def log1p(x: object) -> Symbol:
    """Returns ``log(1 + x)``, a float with all digits near 0."""
    return _call("log1p", x)


def sigmoid(x: object) -> Symbol:
    """Returns ``1 / (1 + exp(-x))`` of a number, a float."""
    return _call("sigmoid", x)


def tanh(x: object) -> Symbol:
    """Returns the hyperbolic tangent of a number, a float. A kernel may round it to 11 bits, as in its softcap."""
    return _call("tanh", x)


def to_int(x: object) -> Symbol:
    """Returns a bool as 0 or 1. A float is refused, because there is no rounding."""
    return _recorder("to_int", x).wrap(cast(_recorder("to_int", x).tree(x), "int"))


def to_float(x: object) -> Symbol:
    """Returns a bool or an int as a float of the dtype in which the expression runs."""
    return _recorder("to_float", x).wrap(cast(_recorder("to_float", x).tree(x), "float"))


def lookup(array: object, *indices: object) -> Symbol:
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


def _call(op: str, *values: object) -> Symbol:
    recorder = _recorder(op, *values)
    return recorder.symbol(op, *(recorder.tree(value) for value in values))


def _recorder(name: str, *values: object) -> Recorder:
    for value in values:
        if isinstance(value, Operand):
            return value.recorder
    raise ExpressionError(f"{name}: expected a symbolic value among the arguments, such as q in a mask_mod(b, h, q, k)")


Mask = Callable[..., Any]
"""``f(b, h, q, k, *aux)``, which gives a bool."""
Score = Callable[..., Any]
"""``g(score, b, h, q, k, *aux)``, which gives a float."""


def causal(offset: int = 0) -> Mask:
    """Returns the mask ``k <= q + offset``.

    Args:
        offset: ``kv_len - q_len`` aligns the diagonal to the bottom right, 0 to the top left.
    """
    _check_int("offset", offset)
    return lambda b, h, q, k, *aux: k <= q + offset


def window(left: int | None, right: int | None, offset: int = 0) -> Mask:
    """Returns the mask of the keys from ``q + offset - left`` to ``q + offset + right``, both included.

    Args:
        left, right: distances of 0 or more, None for no limit.
        offset: as in ``causal``.

    Raises:
        ExpressionError: for a negative distance.
    """
    _check_int("offset", offset)
    for name, distance in (("left", left), ("right", right)):
        if distance is not None:
            _check_int(name, distance, least=0)

    def mask(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Operand) -> Symbol | bool:
        after = True if left is None else k >= q + (offset - left)
        before = True if right is None else k <= q + (offset + right)
        return before if after is True else after if before is True else after & before

    return mask


def documents(ids: Any, kv_ids: Any = None) -> Mask:
    """Returns the mask of keys in the query's document: ``ids[q] == kv_ids[k]``.

    Args:
        ids: int ``[q_len]`` or ``[batch, q_len]``, the number of each query's document.
        kv_ids: int ``[kv_len]`` or ``[batch, kv_len]``, of each key's; None is ids.

    Raises:
        ExpressionError: for arrays of other axes.
    """
    kv_ids = ids if kv_ids is None else kv_ids
    _check_axes("ids", ids, (1, 2))
    _check_axes("kv_ids", kv_ids, (1, 2))
    return lambda b, h, q, k, *aux: _by_batch(ids, b, q) == _by_batch(kv_ids, b, k)


def prefix_lm(lengths: Any, offset: int = 0) -> Mask:
    """Returns the mask of a prefix that every query sees, and causal keys behind it.

    Args:
        lengths: the prefix's keys: an int, or ints ``[batch]``.
        offset: as in ``causal``.

    Raises:
        ExpressionError: for lengths that are neither.
    """
    _check_int("offset", offset)
    if isinstance(lengths, int):
        _check_int("lengths", lengths, least=0)
    else:
        _check_axes("lengths", lengths, (1,))

    def mask(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Operand) -> Symbol | bool:
        return (k <= q + offset) | (k < (lengths if isinstance(lengths, int) else lookup(lengths, b)))

    return mask


def and_masks(*masks: Mask) -> Mask:
    """Returns the mask of keys that every mask shows; each gets all aux arrays. Without masks all keys are visible."""
    return _joined(masks, True, operator.and_)


def or_masks(*masks: Mask) -> Mask:
    """Returns the mask of keys that some mask shows; each gets all aux arrays. Without masks no key is visible."""
    return _joined(masks, False, operator.or_)


def _joined(masks: tuple[Mask, ...], without: bool, join: Callable[[Any, Any], Any]) -> Mask:
    """Returns masks joined by an operation; without any of them the result is ``without``."""

    def mask(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Operand) -> Symbol | bool:
        result: Any = without
        for each in masks:
            visible = each(b, h, q, k, *aux)
            result = visible if result is without else join(result, visible)
        return result

    return mask


def softcap(cap: float) -> Score:
    """Returns the score function ``cap * tanh(score / cap)``.

    Raises:
        ExpressionError: for a cap that is no number above 0.
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < float("inf"):
        raise ExpressionError(f"cap: expected a number above 0, got {shown(cap)}")
    return lambda score, b, h, q, k, *aux: cap * tanh(score / cap)


def alibi(slopes: Any, offset: int = 0) -> Score:
    """Returns the score function ``score - slope * |q + offset - k|``.

    Args:
        slopes: floats ``[heads]`` or ``[batch, heads]``.
        offset: as in ``causal``.

    Raises:
        ExpressionError: for slopes of other axes.
    """
    _check_int("offset", offset)
    _check_axes("slopes", slopes, (1, 2))
    return lambda score, b, h, q, k, *aux: score - _by_batch(slopes, b, h) * abs(q + offset - k)


def relative_bias(table: Any, offset: int = 0) -> Score:
    """Returns the score function that adds a bias by distance: ``score + table[h, clamp(k - q - offset) + farthest]``.

    Args:
        table: floats ``[heads, 2 * farthest + 1]`` or ``[2 * farthest + 1]`` for all heads. The middle is distance 0;
            keys farther away than ``farthest`` have the bias of the end.
        offset: as in ``causal``.

    Raises:
        ExpressionError: for a table of other axes or of an even number of distances.
    """
    _check_int("offset", offset)
    _check_axes("table", table, (1, 2))
    if table.shape[-1] % 2 == 0:
        raise ExpressionError(f"table: expected an odd number of distances on its last axis, got {table.shape[-1]}")
    farthest = table.shape[-1] // 2

    def score_mod(score: Symbol, b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Operand) -> Symbol:
        distance = minimum(maximum(k - q - offset, -farthest), farthest) + farthest
        return score + _by_batch(table, h, distance)

    return score_mod


def compose_scores(*scores: Score) -> Score:
    """Returns the score function that applies others one after the other, the first one first.

    Each gets all aux arrays. Without functions the score stays as it is.
    """

    def score_mod(score: Symbol, b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Operand) -> Symbol:
        for each in scores:
            score = each(score, b, h, q, k, *aux)
        return score

    return score_mod


def _by_batch(array: Any, first: object, last: object) -> Symbol:
    """``array[first, last]``, or ``array[last]`` of an array without the first axis."""
    return lookup(array, last) if len(array.shape) == 1 else lookup(array, first, last)


def _check_axes(name: str, array: object, allowed: tuple[int, ...]) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype") or len(array.shape) not in allowed:
        axes = " or ".join(map(str, allowed))
        raise ExpressionError(f"{name}: expected an array of {axes} axes, got {shown(array)}")


def _check_int(name: str, value: object, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = "" if least is None else f" of {least} or more"
        raise ExpressionError(f"{name}: expected an int{limit}, got {shown(value)}")
