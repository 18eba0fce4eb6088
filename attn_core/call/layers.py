"""What the attention layers of Flax and torch share: their sizes, their options, and the checks of their calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core.call.functions import FUNCTIONS
from attn_core.call.kinds import check_size
from attn_core.call.options import Door, check_flag, names_at
from attn_core.call.segments import Segments
from attn_core.call.tensors import Array
from attn_core.errors import ShapeError, SpecError

ON_ROWS = names_at(Door.LAYER | Door.ATTENTION)
IN_PAGES = names_at(Door.LAYER | Door.PAGES)
OVER_RANKS = names_at(Door.LAYER | Door.RANKS)
"""The options that a layer has for every call, and passes to attention on whole rows, on pages and over ranks."""


def options_of(layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Returns options of a layer as keywords of attention.

    A layer has them as attributes of the same names, but for ``deterministic``: in Flax that means "no dropout".
    """
    options = {name: getattr(layer, name) for name in names}
    return {**options, "deterministic": layer.bitwise_deterministic}


def refuse_over_ranks(options: Mapping[str, object], invariant: str | None) -> None:
    """Raises SpecError for what a layer in context parallelism cannot have.

    Args:
        options: those that the call has, as keywords of ``attention``.
        invariant: of the layer.
    """
    if any(name in options for name in FUNCTIONS):
        raise SpecError(
            "mask_mod, score_mod: expected None in context parallelism, whose ranks have parts of the row; key_ranges "
            "says most masks"
        )
    for name in Segments._fields:
        if name in options:
            raise SpecError(
                f"{name}: expected None in context parallelism, whose ranks have parts of the row; seq_info describes "
                "packed documents there"
            )
    if invariant is not None:
        raise SpecError(
            f"invariant={invariant!r}: expected None with context parallelism, because the parts of a row, and so the "
            "order of sums, depend on the number of ranks"
        )


def rotary_positions(positions: Array | None, options: Mapping[str, object], *, rotary: bool) -> Any:
    """Returns the positions that a layer rotates by: the call's, or else q_positions; None to count them.

    Raises:
        SpecError: if keys have other positions, because a rotary hook rotates q and k by the same ones.
    """
    if not rotary or positions is not None:
        return positions
    queries, keys = options.get("q_positions"), options.get("kv_positions")
    if keys is not None and keys is not queries:
        raise SpecError(
            "positions: expected an array with kv_positions, because the layer's rotary rotates q and k by the same "
            "positions; leave kv_positions out if keys have the positions of queries"
        )
    return queries


class HeadSizes(NamedTuple):
    """A layer's query heads, key/value heads, channels of q and k, and channels of v."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


def head_sizes(
    in_features: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
) -> HeadSizes:
    """Returns the sizes of a layer with the defaults filled in.

    Args:
        in_features: features of the queries' input; head_dim defaults to ``in_features // num_heads``.
        num_heads, num_kv_heads: query heads, and key/value heads (as many as query heads when omitted).
        head_dim, value_dim: channels of q and k, and of v (head_dim when omitted).

    Raises:
        ShapeError: naming the size that does not fit.
    """
    check_size("in_features", in_features, 1)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": value_dim}
    # Before the divisions below, because a size may be 0.
    for name, size in sizes.items():
        if size is not None or name == "num_heads":
            check_size(name, size, 1)
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % key_heads:
        raise ShapeError(f"num_kv_heads={key_heads}: expected a divisor of num_heads={num_heads}")
    if head_dim is None:
        if in_features % num_heads:
            raise ShapeError(
                f"num_heads={num_heads}: expected a divisor of the {in_features} input features; "
                "any other split needs head_dim="
            )
        head_dim = in_features // num_heads
    return HeadSizes(num_heads, key_heads, head_dim, head_dim if value_dim is None else value_dim)


def check_layer_options(use_bias: bool, sinks: bool, **features: int | None) -> None:
    """Raises SpecError or ShapeError for a flag that is no bool, or a number of features that is none; None passes."""
    for name, flag in (("use_bias", use_bias), ("sinks", sinks)):
        check_flag(name, flag)
    for name, number in features.items():
        if number is not None:
            check_size(name, number, 1)


def check_split_heads(widths: tuple[int, int, int], sizes: HeadSizes) -> None:
    """Checks that projections which are split over ranks give each rank an equal part of whole heads.

    Args:
        widths: channels of q, k and v on this rank.

    Raises:
        ShapeError: naming the numbers of heads.
    """
    dims = sizes.head_dim, sizes.head_dim, sizes.value_dim
    q, k, v = (width / dim for width, dim in zip(widths, dims))
    grouped = q * sizes.num_kv_heads == k * sizes.num_heads and k == v
    if not q or not grouped or any(width % dim for width, dim in zip(widths, dims)) or sizes.num_heads % q:
        raise ShapeError(
            f"num_heads={sizes.num_heads}, num_kv_heads={sizes.num_kv_heads}: expected q_proj, k_proj and v_proj to be "
            "split over ranks whose number divides both; got projections that give this rank "
            f"{q:g} heads of q, {k:g} of k and {v:g} of v"
        )


def check_layer_inputs(
    x: tuple[int, ...], context: tuple[int, ...] | None, *, packed: bool, any_batch: bool = False
) -> None:
    """Checks the shapes of a layer's inputs.

    Args:
        x: ``[batch, seq, features]``; packed documents: ``[tokens, features]`` or ``[1, tokens, features]``.
        context: where keys and values come from, laid out as ``x``; None for self-attention.
        packed: whether the call has a ``seq_info``.
        any_batch: whether other calls may have any number of batch axes.

    Raises:
        ShapeError: naming the input.
    """
    layout = "[tokens, features] or [1, tokens, features] with seq_info" if packed else "[batch, seq, features]"
    hint = "" if packed else "; packed documents [tokens, features] need seq_info="
    for name, shape in (("x", x), ("context", context)):
        if shape is None:
            continue
        if not (len(shape) == 3 or (packed and len(shape) == 2) or (any_batch and not packed)):
            raise ShapeError(f"{name}: expected {layout}, got {list(shape)}{hint}")
        # x and context may differ only in their lengths and features.
        if len(shape) != len(x) or shape[:-2] != x[:-2]:
            raise ShapeError(f"{name}: expected the layout and batch of x {list(x)}, got {list(shape)}")


def check_features(x: tuple[int, ...], context: tuple[int, ...] | None, in_features: int, in_kv_features: int) -> None:
    """Checks the last axis of a layer's inputs against the layer's numbers of features.

    Raises:
        ShapeError: naming the input.
    """
    source = in_kv_features if context is not None else in_features
    for name, shape, features in (("x", x, in_features), ("context", context, source)):
        if shape is not None and shape[-1:] != (features,):
            raise ShapeError(
                f"{name}: expected the layer's {features} features on the last axis, got shape {list(shape)}"
            )
    if context is None and in_kv_features != in_features:
        raise ShapeError(f"context: expected an input with the layer's {in_kv_features} key features, got no context")


def check_rotary(layer: Any, positions: Array | None, rows: tuple[int, int], *, cross: bool = False) -> None:
    """Checks the positions of a call: a rotary hook must use them, their shape must fit, and keys must share them.

    Args:
        positions: of the call, an array or None.
        rows: ``(batch, seq)``.
        cross: whether keys come from a context.

    Raises:
        SpecError, ShapeError: naming ``positions`` or ``rotary``.
    """
    shape, rotary = None if positions is None else tuple(positions.shape), layer.rotary is not None
    if shape is not None and not rotary:
        raise SpecError(
            "positions: expected None, because only a rotary hook reads positions and this layer has rotary=None"
        )
    if rotary and cross:
        raise SpecError(
            "rotary: expected self-attention, got a context, whose keys need positions of their own; "
            "pass rotary=None, or call without context"
        )
    if shape is not None and shape not in (rows[1:], rows, (1, rows[1])):
        raise ShapeError(
            f"positions: expected [seq] = [{rows[1]}] or [batch, seq] = {list(rows)} as x has, got {list(shape)}"
        )
