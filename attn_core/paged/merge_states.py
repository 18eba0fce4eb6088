"""The work of ``merge_states``: results of the same queries over different keys, checked and merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from types import ModuleType
from typing import Any

from attn_core.call.arguments import ArrayFacts
from attn_core.call.spec import DTYPES
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError

MOST_PARTS = 4096
"""Each part is an operation, so an array with more parts is rather one with its axes in another order."""
RANKS = (3, 4)
"""The axes of one part's output: packed ``[tokens, heads, dim]``, or dense ``[batch, q_len, heads, dim]``."""


def parts_of(
    outs: Any, lses: Any, check: Callable[[str, Any], object], facts: Callable[[Any], ArrayFacts]
) -> tuple[list[Any], list[Any]]:
    """Returns the parts of the outputs and of the log-sum-exps, checked.

    Args:
        outs, lses: each a sequence of arrays, or one array with the parts along its first axis.
        check: raises an error that names an argument unless it is an array of the frontend.
        facts: of an array.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: naming the part, its value and what was expected.
    """
    for name, value in (("outs", outs), ("lses", lses)):
        if isinstance(value, list | tuple):
            for number, array in enumerate(value):
                check(f"{name}[{number}]", array)
        else:
            check(name, value)
    parts, part_lses = _parts_of("outs", outs, (3, 4)), _parts_of("lses", lses, (2, 3))
    _check_parts(list(map(facts, parts)), list(map(facts, part_lses)))
    return parts, part_lses


def merged(
    xp: ModuleType, parts: Sequence[Any], lses: Sequence[Any], cast: Callable[..., Any], constant: Any
) -> tuple[Any, Any]:
    """Returns (out, lse) of checked parts.

    Args:
        xp: ``torch`` or ``jax.numpy``.
        cast: returns an array in a dtype. constant: returns an array without a gradient.
    """
    stacked = xp.stack(lses)  # [parts, batch, heads, rows], or packed [parts, heads, rows]
    # The result does not depend on this number. -inf - -inf would be NaN.
    base = constant(xp.amax(stacked, 0))
    base = xp.where(base == -inf, 0.0, base)
    weights = xp.exp(stacked - base)
    total = weights.sum(0)
    empty = total == 0
    # The logarithm of 1 in empty rows, because a gradient through log(0) would be NaN.
    divisor = xp.where(empty, 1.0, total)
    lse = xp.where(empty, -inf, base + xp.log(divisor))
    shares = (weights / divisor).swapaxes(-1, -2)[..., None]  # [parts, ..., rows, heads, 1]
    summed = xp.zeros_like(parts[0], dtype=lse.dtype)
    for part, share in zip(parts, shares, strict=True):
        # 0 * NaN is NaN, so what an empty part left in its output must go.
        summed = summed + share * xp.where(share == 0, 0.0, cast(part, lse.dtype))
    return cast(summed, parts[0].dtype), lse


def _parts_of(name: str, value: Any, ranks: tuple[int, ...]) -> list[Any]:
    """Returns the parts of a sequence of arrays, or of one array with the parts along its first axis."""
    if isinstance(value, list | tuple):
        parts = list(value)
    else:
        if len(value.shape) - 1 not in ranks:
            axes = " or ".join(str(rank + 1) for rank in ranks)
            raise ShapeError(
                f"{name}: expected a list of parts, or one array of {axes} axes with the parts along the first, got "
                f"shape {list(value.shape)}"
            )
        if value.shape[0] > MOST_PARTS:
            raise ShapeError(f"{name}: expected at most {MOST_PARTS} parts along the first axis, got {value.shape[0]}")
        parts = [value[number] for number in range(value.shape[0])]
    if not parts:
        raise SpecError(f"{name}: expected one part or more, got none")
    return parts


def _check_parts(outs: Sequence[ArrayFacts], lses: Sequence[ArrayFacts]) -> None:
    """Checks that all parts have one shape, dtype and device, and that each log-sum-exp is that of its output."""
    if len(outs) != len(lses):
        raise SpecError(f"lses: expected as many parts as outs, {len(outs)}, got {len(lses)}")
    first, first_lse = outs[0], lses[0]
    if len(first.shape) not in RANKS:
        raise ShapeError(
            "outs[0]: expected [batch, q_len, heads, value_dim], or packed [tokens, heads, value_dim], "
            f"got {list(first.shape)}"
        )
    if first.dtype not in DTYPES:
        raise DTypeError(f"outs[0]: expected one of {', '.join(DTYPES)}, got {first.dtype}")
    if first_lse.dtype not in ("float32", "float64"):
        raise DTypeError(f"lses[0]: expected float32 or float64, got {first_lse.dtype}; attention returns float32")
    *batch, rows, heads, _ = first.shape
    expected = (*batch, heads, rows)
    for name, parts, shape, dtype in (
        ("outs", outs, tuple(first.shape), first.dtype),
        ("lses", lses, expected, first_lse.dtype),
    ):
        for number, part in enumerate(parts):
            if tuple(part.shape) != shape:
                why = "[batch, heads, q_len], or packed [heads, tokens]" if name == "lses" else "the shape of outs[0]"
                raise ShapeError(f"{name}[{number}]: expected {why}, {list(shape)}, got {list(part.shape)}")
            if part.dtype != dtype:
                raise DTypeError(f"{name}[{number}]: expected the dtype of {name}[0], {dtype}, got {part.dtype}")
            if part.device != first.device:
                raise DeviceError(
                    f"{name}[{number}]: expected the device of outs[0], {first.device}, got {part.device}"
                )
