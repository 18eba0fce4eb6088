"""The launches of the kernels: their tiles, grids, numbers and constants."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attn_core.backends.shared.in_order.order import How, blocks, sequences
from attn_core.backends.shared.triton import Description, Numbers, numbers_of
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor


def settings_of(spec: AttentionSpec) -> Numbers:
    """Returns the kernels' scalar arguments."""
    return {
        **numbers_of(spec),
        "PACKED": spec.packed,
        "BOTTOM_RIGHT": spec.alignment == "bottom_right",
        "LEFT_OPEN": band(spec).left is None,
        "ALIBI": spec.alibi_shape is not None,
    }


def by_row(tensor: Tensor, packed: bool) -> tuple[int, ...]:
    """Returns the strides of a tensor by row, token and head, or by row and head of lse; a packed call has one row."""
    return (0, *tensor.stride()[:-1]) if packed else tuple(tensor.stride()[:-1])


def slope_row(spec: AttentionSpec) -> int:
    """Returns the stride of slopes by row."""
    return spec.num_heads if len(spec.alibi_shape or ()) == 2 and not spec.packed else 0


def attend(spec: AttentionSpec, operands: tuple[Tensor, ...], settings: Numbers, way: How) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.attend``.

    Args:
        operands: the kernel's tensors; partial results ``[shares, tokens of all rows, heads, dim]``, and their
            log-sum-exps ``[shares, heads, tokens of all rows]``.
        settings: from ``settings_of``.
    """
    q, k, v, *_, out, lse = operands
    tiles, packed = way.tiles, spec.packed
    if way.shares:
        out_strides = (spec.q_len * out.stride(1), *out.stride()[:3])
        lse_strides = (spec.q_len, *lse.stride()[:2])
    else:
        row, token, head = by_row(out, packed)
        out_strides = (row, 0, token, head)
        row, head = by_row(lse, packed)
        lse_strides = (row, 0, head)
    q_strides, k_strides, v_strides = (by_row(each, packed) for each in (q, k, v))
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        spec.kv_len,
        settings["left"],
        settings["right"],
        *q_strides,
        *k_strides,
        *v_strides,
        *out_strides,
        *lse_strides,
        slope_row(spec),
    )
    constants = {
        **{"KV_HEADS": spec.num_kv_heads, "GROUP": spec.group_size},
        "NEAR": all(step % 8 == 0 and spec.kv_len * step < 2**34 for step in (k_strides[1], v_strides[1])),  # by token
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{name: value for name, value in settings.items() if name.isupper()},
        **{"PARTIAL": way.shares > 0, "ONE_SHARE": way.one_share, "SHARE": way.share},
        **{"ROWS": tiles.rows, "KEYS": tiles.keys, "num_warps": tiles.warps, "num_stages": tiles.stages},
        "enable_fp_fusion": False,
    }
    # Sequences times heads come first, because only the first axis of a grid may exceed 65535.
    grid = (sequences(spec)[0] * spec.num_kv_heads, max(way.shares, 1), blocks(spec, tiles))
    return grid, numbers, constants


# The gradients.

FLAGS = ("PACKED", "BOTTOM_RIGHT", "SOFTCAP", "LEFT_OPEN", "ALIBI")
SUM_ROWS = 64
"""The tokens of a tile of ``row_sums``."""
SINK_ROWS = 1024
"""The tokens that a program of ``sink_sums`` adds at once."""


class Tile(NamedTuple):
    """A launch's tile of queries and keys, warps, and stages of the pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


TILES = {
    128: (Tile(64, 128, 8, 2), Tile(128, 128, 8, 2)),
    256: (Tile(64, 64, 8, 2), Tile(128, 32, 8, 2)),
}
"""By the wider of head_dim and value_dim, of ``of_keys`` and of ``of_queries``. Nothing else may choose them: the order
of the sums depends on them. As compiled for sm90 in bfloat16, the inner loops of width 128 need the fewest instructions
of those tried, and spill few registers."""


def tiles(spec: AttentionSpec) -> tuple[Tile, Tile]:
    """Returns the tiles of ``of_keys`` and ``of_queries``."""
    wide = max(spec.head_dim, spec.value_dim)
    return next((each for width, each in TILES.items() if wide <= width), TILES[256])


def row_sums(spec: AttentionSpec, operands: tuple[Tensor, ...], has_dlse: bool) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.row_sums``."""
    out, dout, lse, *_ = operands
    steps = [step for each in (out, dout, lse) for step in by_row(each, spec.packed)]
    constants = {"HEADS": spec.num_heads, "VALUE_DIM": spec.value_dim, "DLSE": has_dlse, "ROWS": SUM_ROWS}
    programs = spec.batch * spec.num_heads * -(-spec.q_len // SUM_ROWS)
    return (programs, 1, 1), (spec.q_len, *steps), constants | {"num_warps": 4, "enable_fp_fusion": False}


def sink_sums(spec: AttentionSpec, operands: tuple[Tensor, ...]) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.sink_sums``."""
    numbers = (spec.batch, spec.q_len, *by_row(operands[1], spec.packed))
    constants = {"TILE": SINK_ROWS, "num_warps": 4, "enable_fp_fusion": False}
    return (spec.num_heads, 1, 1), numbers, constants


def of_keys(spec: AttentionSpec, operands: tuple[Tensor, ...], settings: Numbers, tile: Tile) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.of_keys``."""
    number, _, keys = sequences(spec)
    numbers, constants = _common(spec, operands, settings, tile)
    grid = (number * spec.num_kv_heads, -(-keys // tile.keys), 1)
    return grid, numbers, {"KV_HEADS": spec.num_kv_heads, **constants}


def of_queries(spec: AttentionSpec, operands: tuple[Tensor, ...], settings: Numbers, tile: Tile) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.of_queries``."""
    number, queries, _ = sequences(spec)
    numbers, constants = _common(spec, operands, settings, tile)
    grid = (number * spec.num_heads, -(-queries // tile.queries), 1)
    return grid, numbers, {"HEADS": spec.num_heads, **constants}


def _common(
    spec: AttentionSpec, operands: tuple[Tensor, ...], settings: Numbers, tile: Tile
) -> tuple[tuple[float | None, ...], Numbers]:
    """Returns the numbers, in the kernels' order, and the constants that ``of_keys`` and ``of_queries`` both take."""
    q, k, v, dout, lse, _, _, _, _, *results = operands
    steps = [step for each in (q, k, v, dout, lse, *results) for step in by_row(each, spec.packed)]
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        spec.kv_len,
        settings["left"],
        settings["right"],
        *steps,
        slope_row(spec),
    )
    constants = {
        **{"GROUP": spec.group_size, "HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{name: settings[name] for name in FLAGS},
        **{"QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages},
        "enable_fp_fusion": False,
    }
    return numbers, constants
