"""How a call's work is cut: the tiles of queries and keys, and the number of splits of each sequence's keys."""

from __future__ import annotations

from attn_core.backends.triton_splitkv.launches import Tiles
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

PROGRAMS = 4
"""Programs per multiprocessor that saturate its memory bandwidth."""
FEWEST_KEYS = 128
"""The fewest keys of a single sequence that are worth a program of their own; among other sequences twice as many."""
SHARE = 1024
"""The keys of a share if sequences are many. Their lengths differ, and shares of one size finish together."""
MOST_SPLITS = 128


def tiles(spec: AttentionSpec) -> Tiles:
    """Returns the tile sizes for a call: the fastest on an H200 of those tried for 8 to 64 sequences of 8192 tokens."""
    rows, wide = rows_of(spec), max(spec.head_dim, spec.value_dim)
    if wide > 128:
        return Tiles(rows, 32, 4, 2)
    if rows == 16:
        return Tiles(16, 64, 2, 2) if wide > 64 and not _few_programs(spec) else Tiles(16, 128, 4, 2)
    return Tiles(rows, 64, 8 if rows == 128 else 2 if rows == 32 else 4, 2 if rows == 64 else 3)


def _few_programs(spec: AttentionSpec) -> bool:
    """Returns whether so few sequences and heads fill a GPU that larger tiles are faster, and there are several."""
    sequences = spec.documents or 1
    return sequences > 1 and sequences * spec.num_kv_heads < 384


def rows_of(spec: AttentionSpec) -> int:
    """Returns the rows of a tile, queries times heads of a group: a power of two from 16 to 128."""
    rows = (spec.max_len_q or 1) * spec.group_size
    most = 64 if max(spec.head_dim, spec.value_dim) > 128 else 128  # wider tiles of 128 rows need too much memory
    # Triton's matrix product needs 16 rows; larger tiles would leave rows empty in decoding.
    return min(most, max(16, 1 << (rows - 1).bit_length()))


def splits(spec: AttentionSpec, multiprocessors: int) -> int:
    """Returns the number of splits of each sequence's keys. It depends on shapes alone, so equal calls run equally."""
    rows, sequences = rows_of(spec), spec.documents or 1
    programs = sequences * spec.num_kv_heads * -(-(spec.max_len_q or 1) * spec.group_size // rows)
    full = multiprocessors * PROGRAMS
    reach = band(spec).left
    keys = spec.max_len_k or spec.kv_len
    if reach is not None:  # a window bounds the keys that the queries of a sequence see together
        keys = min(keys, reach + (spec.max_len_q or 1))
    if sequences == 1:
        count = min(full // max(programs, 1), -(-keys // FEWEST_KEYS))
    else:
        even = min(-(-keys // (SHARE if rows < 128 else 2 * SHARE)), 2 * full // max(programs, 1))
        count = max(even, min(full // 2 // max(programs, 1), -(-keys // (2 * FEWEST_KEYS))))
    return max(1, min(count, MOST_SPLITS))
