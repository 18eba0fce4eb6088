"""Segment ids and positions of tokens: the mask that training code for JAX says with them, as a mask function.

A query sees a key only if their segment ids are equal. Every pair is compared, so ids may have any values and any
order: neighbours may share an id, an id may return later, and padding is a segment like any other. With positions the
distances of causal and window are differences of positions, not of places in the row. All of it becomes one mask
function, so a backend sees a call with ``mask_mod`` and ``aux``, and no value is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.call.added_functions import and_mask
from attn_core.call.functions import renumbered
from attn_core.call.options import check_flag, normalise_window
from attn_core.call.traced_options import TRACED, Scores, is_traced, of_sides, traced_sides, without_traced
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.expressions.ready_made import and_masks
from attn_core.expressions.tracing import Aux, TracedFunction, trace_mask
from attn_core.expressions.tree import Expression


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


def without_segments(
    segments: Segments,
    visible: Visible,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    others: Mapping[str, Any],
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
        raise SpecError(
            f"seq_info: expected None with {_first(segments)}, because both say which tokens belong together"
        )
    band: tuple[Any, Any] = (None, None)
    distances: list[Any] = []
    counts_keys = False
    if by_position:
        if others.get("alibi_slopes") is not None:
            raise SpecError("alibi_slopes: expected None with positions, because slopes count places in the row")
        if traced_window and is_traced(window, None):
            band, counts_keys, distances = traced_sides(window, causal)
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
    joined = and_mask(mask_mod, aux, arrays, lambda numbers: function_of(has_ids, band, counts_keys, numbers), tracer)
    return Visible(causal, window, joined, aux)


def as_plain(scores: Scores, segments: Segments, rows: tuple[Any, Any], seq_info: Any, alibi_slopes: Any) -> Scores:
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
        scores = without_traced(scores, lengths, seq_info)  # type: ignore[arg-type]
    return scores


def _checked(segments: Segments, shapes: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
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
                raise SpecError(
                    f"kv_{what}: expected an array, because q has {shapes[0][1]} tokens and k has {shapes[1][1]}"
                )
            keys = queries
        for side, array, shape in (("q", queries, shapes[0]), ("kv", keys, shapes[1])):
            _check(f"{side}_{what}", array, shape[:2])
        pairs.append((queries, keys))
    return pairs[0], pairs[1]


def _check(name: str, array: Any, expected: tuple[Any, ...]) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise TypeError(f"{name}: expected an int32 array [batch, length], got {type(array).__name__}")
    if tuple(array.shape) != tuple(expected):
        raise ShapeError(f"{name}: expected shape {list(expected)}, one number for each token, got {list(array.shape)}")
    if str(array.dtype).removeprefix("torch.") != "int32":
        raise DTypeError(f"{name}: expected dtype int32, got {array.dtype}; cast it to int32")


def given_segments(*segments: Any) -> dict[str, Any]:
    """Returns the fields of ``Segments`` that are not None, as keywords of ``attention``; usually an empty dict."""
    return {name: array for name, array in zip(Segments._fields, segments, strict=True) if array is not None}


def _first(segments: Segments) -> str:
    return next(iter(given_segments(*segments)))


def function_of(has_ids: bool, band: tuple[Any, Any], counts_keys: bool, numbers: tuple[int, ...]) -> Expression:
    """Returns the expression of equal ids and of a band of positions; cached.

    Args:
        has_ids: whether the first two arrays are segment ids. Two are positions if the band hides anything, then those
            of its distances that are ``TRACED``.
        counts_keys: whether the left distance counts keys, self included.
        numbers: the number of each array among those of the call.
    """
    return _function_of(has_ids, band, counts_keys, numbers)  # a compiler that must not look inside cannot mark a cache


@lru_cache(maxsize=256)
def _function_of(has_ids: bool, band: tuple[Any, Any], counts_keys: bool, numbers: tuple[int, ...]) -> Expression:
    at = 2 if has_ids else 0  # of the positions of queries; those of keys come next
    scalars = band.count(TRACED)

    def same_segment(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
        return aux[0][b, q] == aux[1][b, k]

    def not_before(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
        left = of_sides(band, aux[at + 2 :])[0]
        return aux[at + 1][b, k] >= aux[at][b, q] - (left - 1 if counts_keys else left)

    def not_after(b: Any, h: Any, q: Any, k: Any, *aux: Any) -> Any:
        return aux[at + 1][b, k] <= aux[at][b, q] + of_sides(band, aux[at + 2 :])[1]

    masks = [same_segment] if has_ids else []
    masks += [not_before] if band[0] is not None else []
    masks += [not_after] if band[1] is not None else []
    kinds = (*(Aux((1, 1), "int32"),) * (len(numbers) - scalars), *(Aux((), "int32"),) * scalars)
    tree = trace_mask(and_masks(*masks), kinds).tree
    return renumbered(tree, dict(enumerate(numbers)))
