"""Checks the arguments of rotary embeddings, for both frontends, and says what the embedding is.

A head's first ``rotary_dim`` channels are pairs (a, b). The token at position p turns pair i by an angle whose cosine
and sine are ``cos[p, i]`` and ``sin[p, i]``: ``(a cos - b sin, b cos + a sin)``. The pairs are channels ``(i, i +
rotary_dim / 2)``, as in GPT-NeoX and Llama, or interleaved, ``(2i, 2i + 1)``, as in GPT-J. Others do not change.

Every product and every sum is rounded by itself, in float32 (float64 for float64 data), and the result once to its
dtype. No step may use a fused multiply-add, so torch, Triton and JAX compute the same bits. Denormal numbers are the
exception: XLA takes them as 0 on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.arguments import ArrayFacts, check_one_place
from attn_core.call.kinds import check_within
from attn_core.call.spec import DTYPES
from attn_core.errors import DTypeError, ShapeError, SpecError, shown

INDEX_DTYPES = ("int32", "int64")
COS, SIN = "rotary[0]", "rotary[1]"
"""The names of cos and sin in errors of ``append_kv``, whose argument is the pair."""


def pair_of(rotary: object) -> tuple[Any, Any]:
    """Returns (cos, sin) of the argument ``rotary``. Raises SpecError unless it is a pair without None."""
    if not isinstance(rotary, tuple | list) or len(rotary) != 2 or rotary[0] is None or rotary[1] is None:
        raise SpecError(f"rotary={shown(rotary)}: expected a pair (cos, sin) of arrays, or None")
    return rotary[0], rotary[1]


def check_apply(named: dict[str, ArrayFacts]) -> None:
    """Checks the arrays of ``apply_rotary``, by the names of its arguments: x, cos, sin and positions.

    Raises:
        ShapeError, DTypeError, DeviceError: naming argument, value and what was expected.
    """
    x = named["x"]
    check_one_place(named, "x")
    if len(x.shape) < 2:
        raise ShapeError(f"x: expected [..., heads, head_dim], got {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise DTypeError(f"x: expected one of {', '.join(DTYPES)}, got {x.dtype}")
    check_tables(named["cos"], named["sin"], x)
    check_positions(named["positions"], x.shape[:-2])


def check_tables(cos: ArrayFacts, sin: ArrayFacts, x: ArrayFacts, names: tuple[str, str] = ("cos", "sin")) -> None:
    """Checks cos and sin, ``[max_positions, rotary_dim / 2]``, for heads ``x [..., head_dim]``; names: in errors."""
    if len(cos.shape) != 2 or 0 in cos.shape:
        raise ShapeError(f"{names[0]}: expected [max_positions, rotary_dim / 2], got {list(cos.shape)}")
    if sin.shape != cos.shape:
        raise ShapeError(f"{names[1]}: expected the shape of {names[0]}, {list(cos.shape)}, got {list(sin.shape)}")
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ShapeError(
            f"{names[0]}: expected at most {x.shape[-1] // 2} angles for a head_dim of {x.shape[-1]}, got "
            f"{cos.shape[1]}, which is a rotary_dim of {2 * cos.shape[1]}"
        )
    for name, facts in zip(names, (cos, sin), strict=True):
        # Less precision than the caller's table has would be a silent change; float64 is computed only for float64.
        allowed = DTYPES if x.dtype == "float64" else DTYPES[1:]
        if facts.dtype not in allowed:
            raise DTypeError(f"{name}: expected one of {', '.join(allowed)}, got {facts.dtype}; cast it")


def check_positions(positions: ArrayFacts, shape: tuple[int, ...]) -> None:
    """Raises DTypeError or ShapeError unless positions are whole numbers of a shape."""
    if positions.dtype not in INDEX_DTYPES:
        raise DTypeError(f"positions: expected dtype int32 or int64, got {positions.dtype}; cast it")
    if tuple(positions.shape) != tuple(shape):
        raise ShapeError(f"positions: expected one for each token, shape {list(shape)}, got {list(positions.shape)}")


def check_position_values(positions: np.ndarray, max_positions: int) -> None:
    """Raises SpecError for a position on the host that is no row of cos and sin."""
    check_within("positions", positions, max_positions - 1, f", because cos and sin have {max_positions} positions")
