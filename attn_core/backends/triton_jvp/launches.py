"""The launch of the forward-mode kernel: its tiles, its grid, its numbers and constants."""

from __future__ import annotations

from typing import Any, NamedTuple

from attn_core.backends.shared.programs.triton import Description
from attn_core.call.spec import AttentionSpec


class Tiles(NamedTuple):
    """The tiles of a launch: queries, keys and channels of the values; warps, and stages of the pipeline.

    shared: the KiB of shared memory with all tangents, as compiled for compute capability 9.0.
    """

    queries: int
    keys: int
    values: int
    warps: int
    stages: int
    shared: int


# By channels of the logits. Compiled for compute capability 9.0, the first of each line spills no register in bfloat16.
# float32 has less to choose from: a product of three TF32 products has its operands in shared memory twice.
HALF = {
    64: (Tiles(64, 64, 64, 4, 2, 80), Tiles(64, 32, 64, 4, 2, 48)),
    128: (Tiles(128, 64, 128, 8, 2, 192), Tiles(64, 32, 128, 4, 2, 96)),
    256: (
        *(Tiles(128, 32, 128, 8, 2, 224), Tiles(64, 32, 128, 4, 2, 160)),
        *(Tiles(64, 32, 128, 4, 1, 96), Tiles(32, 32, 128, 4, 1, 48)),
    ),
}
SINGLE = {
    64: (Tiles(64, 32, 64, 4, 1, 96), Tiles(32, 32, 64, 4, 1, 40)),
    128: (Tiles(64, 32, 64, 4, 1, 192), Tiles(32, 32, 128, 4, 1, 80)),
    256: (Tiles(16, 32, 128, 4, 1, 96),),
}
SMALLEST = SINGLE[256][0]
"""The tiles with the most programs."""


def width(dim: int) -> int:
    """Returns the channels of a tile for a head dimension: a power of two, at least 16 for the matrix product."""
    return max(16, 1 << (dim - 1).bit_length())


def tiles(spec: AttentionSpec, shared_memory: int) -> Tiles:
    """Returns the tiles of a call on a GPU whose programs have so many bytes of shared memory."""
    table = SINGLE if spec.dtype == "float32" else HALF
    channels = next(limit for limit in table if max(width(spec.head_dim), min(width(spec.value_dim), 128)) <= limit)
    queries = spec.q_len if spec.max_len_q is None else spec.max_len_q
    rows = 64 if queries <= 64 else 128
    fitting = [each for each in table[channels] if each.shared * 1024 <= shared_memory]
    return next((each for each in fitting if each.queries <= rows), table[channels][-1])


def programs(spec: AttentionSpec, tile: Tiles) -> int:
    """Returns the number of programs of a launch."""
    rows, longest = (spec.documents, spec.max_len_q) if spec.packed else (spec.batch, spec.q_len)
    parts = -(-spec.value_dim // min(tile.values, width(spec.value_dim)))
    return (rows or 0) * spec.num_heads * parts * -(-(longest or 0) // tile.queries)


def attend(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    moves: tuple[bool, ...],
    primals: bool,
    settings: dict[str, Any],
    tile: Tiles,
) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.attend``.

    Args:
        strides: of q, k, v, dq, dk and dv, or of what stands in for an absent tangent.
        moves: which of dq, dk, dv and dsinks exist.
        settings: the arguments from ``lower``.
    """
    longest = spec.q_len if spec.max_len_q is None else spec.max_len_q
    # Packed tensors have no batch axis.
    steps = [step for each in strides for step in ((0, *each[:2]) if spec.packed else each[:3])]
    numbers = (
        *(settings["scale"], settings["softcap"]),
        *(spec.q_len, spec.kv_len, -(-longest // tile.queries), settings["left"], settings["right"]),
        *steps,
    )
    flags = ("PACKED", "BOTTOM_RIGHT", "LEFT", "SOFTCAP", "SINKS")
    constants = {
        **{"HEADS": spec.num_heads, "GROUP": spec.group_size},
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{"HEAD_WIDTH": width(spec.head_dim), "VALUE_WIDTH": min(tile.values, width(spec.value_dim))},
        **{name: settings[name] for name in flags},
        **dict(zip(("DQ", "DK", "DV", "DSINKS"), moves, strict=True)),
        **{"PRIMALS": primals, "PRECISION": "tf32x3" if spec.dtype == "float32" else "ieee"},
        **{"QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages},
    }
    return (programs(spec, tile), 1, 1), numbers, constants
