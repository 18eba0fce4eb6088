"""Windows and scales whose values a program learns only when it runs: they become mask and score functions.

A scan over layers, for example, has the window of each layer as a traced number. Kernels that take functions read it
from the device; other backends refuse the call by naming ``mask_mod`` or ``score_mod``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.added_functions import and_mask, before_score
from attn_core.call.functions import renumbered
from attn_core.call.options import check_flag
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.expressions import ready_made
from attn_core.expressions.tracing import Aux, trace_mask, trace_score
from attn_core.expressions.tree import Expression


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


def is_traced(window: Any, scale: Any) -> bool:
    """Returns whether the scale or a distance of the window is an array, so that its value may not be known here."""
    distances = window if isinstance(window, (tuple, list)) else (window,)
    return any(_is_array(each) for each in (scale, *distances))


def without_traced(scores: Scores, lengths: tuple[Any, Any], seq_info: Any) -> Scores:
    """Returns the arguments of the same call in which neither window nor scale is an array.

    Args:
        lengths: of q and k.
        seq_info: of the call; with documents a window counts in each, which a function of the whole row cannot.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument.
    """
    causal, alignment, window, softcap, scale, mask_mod, score_mod, aux = scores
    if _is_array(scale):
        _check("scale", scale, "float")
        cap = None if softcap is None else float(softcap)
        score_mod = before_score(score_mod, aux, [scale], lambda numbers: _scaled(cap, numbers[0]))
        scale, softcap = 1.0, None
    if is_traced(window, None):
        if seq_info is not None:
            raise SpecError(
                "window: expected ints on the host with seq_info, got an array; q_segment_ids= takes a traced window"
            )
        offset = 0 if alignment == "top_left" else lengths[1] - lengths[0]
        sides, counts_keys, arrays = traced_sides(window, causal)
        mask_mod = and_mask(mask_mod, aux, arrays, lambda numbers: _banded(sides, counts_keys, offset, numbers))
        window = None
    return Scores(causal, alignment, window, softcap, scale, mask_mod, score_mod, aux)


TRACED = "traced"
"""A distance whose value is in an array."""


def traced_sides(window: Any, causal: Any) -> tuple[tuple[Any, Any], bool, list[Any]]:
    """Returns the distances of a window (each an int, None or ``TRACED``), whether the left one counts keys, self
    included, and the arrays of the traced ones, in order.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument.
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
        _check("window", array, "int32")
    return (left, right), counts_keys, arrays


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, (np.generic, np.ndarray))


def _check(name: str, array: Any, kind: str) -> None:
    if tuple(array.shape) != ():
        raise ShapeError(f"{name}: expected a number, an array without axes, got shape {list(array.shape)}")
    if kind not in str(array.dtype):
        raise DTypeError(f"{name}: expected dtype {kind}, got {array.dtype}")


def _fixed(name: str, side: Any) -> int | str | None:
    """Returns a distance that is known, None without a limit, or "traced"."""
    if side is None or _is_array(side):
        return None if side is None else TRACED
    if isinstance(side, bool) or not isinstance(side, (int, np.integer)) or side < 0:
        raise SpecError(f"window: expected a {name} distance of 0 or more, None or an array, got {side!r}")
    return int(side)


@lru_cache(maxsize=256)
def _banded(sides: tuple[Any, Any], counts_keys: bool, offset: Any, numbers: tuple[int, ...]) -> Expression:
    """Returns the expression of a window. counts_keys: whether the left number counts keys, self included."""

    def mask(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
        left, right = of_sides(sides, aux)
        shown: Any = True
        if left is not None:
            shown = k + (left - 1 if counts_keys else left) >= q + offset
        if right is not None:
            before = k <= q + offset + right
            shown = before if shown is True else shown & before
        return shown

    tree = trace_mask(mask, (Aux((), "int32"),) * len(numbers)).tree
    return renumbered(tree, dict(enumerate(numbers)))


def of_sides(sides: tuple[Any, Any], aux: Sequence[Any]) -> list[Any]:
    """Returns the two distances, those of ``TRACED`` from the arrays of a function, in order."""
    arrays = iter(aux)
    return [next(arrays) if side == TRACED else side for side in sides]


@lru_cache(maxsize=256)
def _scaled(cap: float | None, number: int) -> Expression:
    """Returns the expression of a score times a number in an array, then softcapped."""

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, factor: Any) -> Any:
        scaled = score * factor
        return scaled if cap is None else ready_made.softcap(cap)(scaled, b, h, q, k)

    tree = trace_score(score_mod, (Aux((), "float32"),)).tree
    return renumbered(tree, {0: number})
