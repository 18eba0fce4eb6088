"""Segment ids, positions, and windows and scales that are arrays: they become the mask and score functions of a call.

Training code for JAX says masks by segment ids. A query sees a key only if their ids are equal. Every pair is compared,
so ids may have any values and any order: neighbours may share an id, an id may return later, and padding is a segment
like any other. With positions the distances of causal and window are differences of positions, not of places in the
row. A window or a scale may have a value that a program learns only when it runs: a scan over layers has the window of
each layer as a traced number.

A backend sees a call with ``mask_mod`` or ``score_mod`` and ``aux``, and no value is read on the host. Kernels that
take functions read the values from the device; other backends refuse the call by naming the function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import Function, renumbered
from attn_core.call.kinds import check_int32
from attn_core.call.options import EXCHANGED_HINT, check_flag, normalise_window
from attn_core.call.seq_info import SeqInfoLike
from attn_core.call.tensors import Array
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.expressions import functions
from attn_core.expressions.building import build
from attn_core.expressions.symbols import Array as SymbolicArray
from attn_core.expressions.symbols import Symbol, place_of
from attn_core.expressions.tracing import Aux, TracedFunction, trace_mask, trace_score
from attn_core.expressions.tree import Expression, nodes

TRACED = "traced"
"""A distance whose value is in an array."""
Sides = tuple[int | str | None, int | str | None]
"""The distances of a window, each a number, TRACED or None."""


class Segments(NamedTuple):
    """The arguments of a call that say which segment each token is in, and its position; int32 ``[batch, length]``."""

    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_positions: Any = None
    kv_positions: Any = None


class Visible(NamedTuple):
    """The arguments of a call that say which keys a query sees, as its caller wrote them."""

    causal: bool
    window: Any
    mask_mod: Any
    aux: Any


class Scores(NamedTuple):
    """The arguments of a call that a traced window or scale changes, as its caller wrote them."""

    causal: bool
    alignment: str
    window: Any
    softcap: Any
    scale: Any
    mask_mod: Any
    score_mod: Any
    aux: Any


def without_segments(
    segments: Segments,
    visible: Visible,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    others: Mapping[str, object],
    tracer: Callable[..., TracedFunction] = trace_mask,
    *,
    traced_window: bool = False,
) -> Visible:
    """Returns the arguments of the same call without segments: they become part of the mask function.

    Args:
        shapes: of q and k, ``[batch, length, heads, head_dim]``.
        others: ``seq_info`` and ``alibi_slopes`` of the call, which segments and positions exclude.
        tracer: ``trace_mask``, or one that a compiler does not look into.
        traced_window: whether a distance of the window may be an array.

    Returns:
        The arguments; with positions without causal and window, which the function then says.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument.
    """
    pairs = _checked(segments, shapes)
    causal, window, mask_mod, aux = visible
    by_position = segments.q_positions is not None or segments.kv_positions is not None
    if others.get("seq_info") is not None:
        first = next(name for name, array in zip(Segments._fields, segments, strict=True) if array is not None)
        raise SpecError(f"seq_info: expected None with {first}, because both say which tokens belong together")
    band: tuple[Any, Any] = (None, None)
    distances: list[Any] = []
    counts_keys = False
    if by_position:
        if others.get("alibi_slopes") is not None:
            raise SpecError("alibi_slopes: expected None with positions, because slopes count places in the row")
        if traced_window and is_traced(window, None):
            band, counts_keys, distances = _traced_sides(window, causal)
        else:
            band = normalise_window(window, check_flag("causal", causal))
        band = band[0], 0 if check_flag("causal", causal) else band[1]
        distances = distances[: band.count(TRACED)]  # causal replaces the right one, the last
        if band == (None, None):
            raise SpecError(
                "q_positions, kv_positions: expected causal=True or a window, because no other mask reads them"
            )
        causal, window = False, None
    arrays = [*(array for pair in pairs for array in pair), *distances]
    has_ids = len(pairs[0]) > 0

    def tree_of(numbers: tuple[int, ...]) -> Expression:
        return function_of(has_ids, band, counts_keys, numbers)

    joined = _joined(mask_mod, aux, arrays, tree_of, tracer, _both)
    return Visible(causal, window, joined, aux)


def as_plain(
    scores: Scores, segments: Segments, rows: tuple[object, object], seq_info: SeqInfoLike, alibi_slopes: Array | None
) -> Scores:
    """Returns the arguments of the same call without segments, and without traced windows and scales.

    Args:
        rows: q and k, with the sequence before the heads.
        seq_info, alibi_slopes: of the call; some of the above exclude them.
    """
    # A value that is no array has no shape: its own check names it.
    shapes = tuple(getattr(rows[0], "shape", ())), tuple(getattr(rows[1], "shape", ()))
    if any(each is not None for each in segments):
        others = {"seq_info": seq_info, "alibi_slopes": alibi_slopes}
        visible = Visible(scores.causal, scores.window, scores.mask_mod, scores.aux)
        visible = without_segments(segments, visible, shapes, others, traced_window=True)
        scores = scores._replace(**visible._asdict())
    if is_traced(scores.window, scores.scale):
        lengths = tuple([shape[-3] if len(shape) > 2 else 0 for shape in shapes])
        scores = _without_traced(scores, lengths, seq_info)  # type: ignore[arg-type]
    return scores


def _checked(
    segments: Segments, shapes: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Returns the pairs of ids and of positions, () for a pair that the call lacks."""
    pairs: list[tuple[Any, ...]] = []
    for what in ("segment_ids", "positions"):
        queries, keys = (getattr(segments, f"{side}_{what}") for side in ("q", "kv"))
        if queries is None and keys is None:
            pairs.append(())
            continue
        if queries is None:
            raise SpecError(f"q_{what}: expected an array with kv_{what}, got None")
        if len(shapes[0]) != 4 or len(shapes[1]) != 4:
            raise ShapeError(
                f"q_{what}: expected q of [batch, q_len, heads, head_dim] with it, got {list(shapes[0])}; rows without "
                "a batch axis are documents, which seq_info describes"
            )
        if keys is None:
            if shapes[0][1] != shapes[1][1]:
                tokens = f"q has {shapes[0][1]} tokens and k has {shapes[1][1]}"
                raise SpecError(f"kv_{what}: expected an array, because {tokens}{_hint(queries, shapes[0])}")
            keys = queries
        for side, array, shape in (("q", queries, shapes[0]), ("kv", keys, shapes[1])):
            _check(f"{side}_{what}", array, shape)
        pairs.append((queries, keys))
    return pairs[0], pairs[1]


def _check(name: str, array: object, shape: tuple[int, ...]) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name}: expected an int32 array [batch, length], got {type(array).__name__}")
    expected = shape[:2]
    if tuple(array.shape) != expected:
        got = f"got {list(array.shape)}{_hint(array, shape)}"
        raise ShapeError(f"{name}: expected shape {list(expected)}, one number for each token, {got}")
    check_int32(name, array.dtype)


def _hint(array: object, shape: tuple[int, ...]) -> str:
    """Returns a hint for an error if an array has the length of the axis of heads."""
    return f"; {EXCHANGED_HINT}" if tuple(getattr(array, "shape", ())) == (shape[0], shape[2]) else ""


def function_of(has_ids: bool, band: Sides, counts_keys: bool, numbers: tuple[int, ...]) -> Expression:
    """Returns the expression of equal ids and of a band of positions; cached.

    Args:
        has_ids: whether the first two arrays are segment ids. Two are positions if the band hides anything, then those
            of its distances that are ``TRACED``.
        counts_keys: whether the left distance counts keys, self included.
        numbers: the number of each array among those of the call.
    """
    return _function_of(has_ids, band, counts_keys, numbers)  # a compiler that must not look inside cannot mark a cache


@lru_cache(maxsize=256)
def _function_of(has_ids: bool, band: Sides, counts_keys: bool, numbers: tuple[int, ...]) -> Expression:
    """``function_of``: numbers its arrays from 0 while it is traced, then as in the call."""
    at = 2 if has_ids else 0  # of the positions of queries; those of keys come next
    scalars = band.count(TRACED)

    def same_segment(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: SymbolicArray) -> Symbol:
        return aux[0][b, q] == aux[1][b, k]

    def not_before(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: SymbolicArray) -> Symbol:
        left = _of_sides(band, aux[at + 2 :])[0]
        return aux[at + 1][b, k] >= aux[at][b, q] - (left - 1 if counts_keys else left)

    def not_after(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: SymbolicArray) -> Symbol:
        return aux[at + 1][b, k] <= aux[at][b, q] + _of_sides(band, aux[at + 2 :])[1]

    masks = [same_segment] if has_ids else []
    masks += [not_before] if band[0] is not None else []
    masks += [not_after] if band[1] is not None else []
    kinds = (*(Aux((1, 1), "int32"),) * (len(numbers) - scalars), *(Aux((), "int32"),) * scalars)
    tree = trace_mask(functions.and_masks(*masks), kinds).tree
    return renumbered(tree, dict(enumerate(numbers)))


def is_traced(window: object, scale: object) -> bool:
    """Returns whether the scale or a distance of the window is an array, so that its value may not be known here."""
    distances = window if isinstance(window, (tuple, list)) else (window,)
    return any(_is_array(each) for each in (scale, *distances))


def _without_traced(scores: Scores, lengths: tuple[int, int], seq_info: SeqInfoLike) -> Scores:
    """Returns the arguments of the same call in which neither window nor scale is an array.

    With documents a window counts in each, which a function of the whole row cannot.
    """
    causal, alignment, window, softcap, scale, mask_mod, score_mod, aux = scores
    if _is_array(scale):
        _check_scalar("scale", scale, "float")
        cap = None if softcap is None else float(softcap)
        score_mod = _joined(score_mod, aux, [scale], lambda numbers: _scaled(cap, numbers[0]), trace_score, _before)
        scale, softcap = 1.0, None
    if is_traced(window, None):
        if seq_info is not None:
            raise SpecError(
                "window: expected ints on the host with seq_info, got an array; q_segment_ids= takes a traced window"
            )
        offset = 0 if alignment == "top_left" else lengths[1] - lengths[0]
        sides, counts_keys, arrays = _traced_sides(window, causal)

        def tree_of(numbers: tuple[int, ...]) -> Expression:
            return _banded(sides, counts_keys, offset, numbers)

        mask_mod = _joined(mask_mod, aux, arrays, tree_of, trace_mask, _both)
        window = None
    return Scores(causal, alignment, window, softcap, scale, mask_mod, score_mod, aux)


def _traced_sides(window: Any, causal: object) -> tuple[Sides, bool, list[Any]]:
    """Returns the distances of a window (each an int, None or ``TRACED``), whether the left one counts keys, self
    included, and the arrays of the traced ones, in order.
    """
    counts_keys = not isinstance(window, (tuple, list))
    if counts_keys and not check_flag("causal", causal):
        raise SpecError("window: expected causal=True with one number of keys, or a pair (left, right)")
    if not counts_keys and len(window) != 2:
        raise SpecError(f"window: expected a pair (left, right), got {len(window)} numbers")
    sides = (window, None) if counts_keys else tuple(window)
    left, right = (_fixed(name, side) for name, side in zip(("left", "right"), sides, strict=True))
    arrays = [side for side in sides if _is_array(side)]
    for array in arrays:
        _check_scalar("window", array, "int32")
    return (left, right), counts_keys, arrays


def _is_array(value: object) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (np.generic, np.ndarray))


def _check_scalar(name: str, array: Array, kind: str) -> None:
    if tuple(array.shape) != ():
        raise ShapeError(f"{name}: expected a number, an array without axes, got shape {list(array.shape)}")
    if kind not in str(array.dtype):
        raise DTypeError(f"{name}: expected dtype {kind}, got {array.dtype}")


def _fixed(name: str, side: object) -> int | str | None:
    """Returns a distance that is known, None without a limit, or "traced"."""
    if side is None or _is_array(side):
        return None if side is None else TRACED
    if isinstance(side, bool) or not isinstance(side, (int, np.integer)) or side < 0:
        raise SpecError(f"window: expected a {name} distance of 0 or more, None or an array, got {side!r}")
    return int(side)


@lru_cache(maxsize=256)
def _banded(sides: Sides, counts_keys: bool, offset: int, numbers: tuple[int, ...]) -> Expression:
    """Returns the expression of a window. counts_keys: whether the left number counts keys, self included."""

    def mask(b: Symbol, h: Symbol, q: Symbol, k: Symbol, *aux: Symbol) -> Symbol:
        left, right = _of_sides(sides, aux)
        shown: Any = True
        if left is not None:
            shown = k + (left - 1 if counts_keys else left) >= q + offset
        if right is not None:
            before = k <= q + offset + right
            shown = before if shown is True else shown & before
        return shown

    tree = trace_mask(mask, (Aux((), "int32"),) * len(numbers)).tree
    return renumbered(tree, dict(enumerate(numbers)))


def _of_sides(sides: Sides, aux: Sequence[Any]) -> list[Any]:
    """Returns the two distances, those of ``TRACED`` from the arrays of a function, in order."""
    arrays = iter(aux)
    return [next(arrays) if side == TRACED else side for side in sides]


@lru_cache(maxsize=256)
def _scaled(cap: float | None, number: int) -> Expression:
    """Returns the expression of a score times a number in an array, then softcapped."""

    def score_mod(score: Symbol, b: Symbol, h: Symbol, q: Symbol, k: Symbol, factor: Symbol) -> Symbol:
        scaled = score * factor
        return scaled if cap is None else functions.softcap(cap)(scaled, b, h, q, k)

    tree = trace_score(score_mod, (Aux((), "float32"),)).tree
    return renumbered(tree, {0: number})


def _joined(
    function: Function | None,
    aux: object,
    arrays: Sequence[object],
    tree_of: Callable[[tuple[int, ...]], Expression],
    tracer: Callable[..., TracedFunction],
    join: Callable[[Expression, Expression], Expression],
) -> TracedFunction:
    """Returns the call's function and ours in one.

    Args:
        function: the call's, traced or not, or None; aux: its arrays.
        arrays: those of our function. Each counts once, as q's ids may be k's.
        tree_of: returns the expression of our function, from the numbers of its arrays among those of the call.
        tracer: ``trace_mask`` or ``trace_score``, or one that a compiler does not look into.
        join: returns one expression of ours and the call's.
    """
    theirs = function if function is None or isinstance(function, TracedFunction) else tracer(function, aux)
    count = len(aux) if isinstance(aux, (tuple, list)) else 0
    captured = [] if theirs is None else list(theirs.captured)
    tree = tree_of(tuple([count + place_of(array, captured) for array in arrays]))
    return TracedFunction(tree if theirs is None else join(tree, theirs.tree), tuple(captured), count)


@lru_cache(maxsize=256)
def _both(ours: Expression, theirs: Expression) -> Expression:
    return build("and", ours, theirs)


@lru_cache(maxsize=256)
def _before(ours: Expression, theirs: Expression) -> Expression:
    """Returns the call's score expression of the score that ours gives."""
    changed: dict[Expression, Expression] = {}
    for node in nodes(theirs):
        operands = tuple([changed[operand] for operand in node.operands])
        changed[node] = ours if node.op == "score" else Expression(node.op, node.kind, operands, node.value)
    return changed[theirs]
