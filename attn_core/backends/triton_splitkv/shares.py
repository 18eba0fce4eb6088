"""How a call's work is cut: the tiles of queries and keys, and the number of splits of each sequence's keys."""

from __future__ import annotations

from attn_core.backends.shared.in_order.order import Tiles
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

PROGRAMS = 4
"""Programs that a multiprocessor runs at once. They saturate its memory bandwidth."""
SPEEDS = (0.0, 0.6, 0.93, 0.99, 1.0)
"""The part of the bandwidth that 0 to PROGRAMS programs on each multiprocessor reach: a fit to calls on an H200."""
START = 25
"""The keys, of 256 channels with their values, that a program could read in the time that it takes to start."""
TAIL = 0.05
"""The part of a program's time for which the longest sequence runs alone at the end, because lengths differ."""
PROGRAMS_OF_INT4 = 6
"""As PROGRAMS, for int4 pages: their programs have few registers, and so many run at once."""
FEWEST_KEYS = 128
"""The fewest keys that are worth a program of their own; of drafts and quantised pages twice as many."""
SHARE = 1024
"""The keys of a share if sequences are many. Their lengths differ, and shares of one size finish together."""
MOST_ROUNDS = 5
"""The most rounds of programs that shares of one size may need."""
MOST_SPLITS = 128
TURNED_ROWS = 8
"""The rows of a tile whose products are turned around; see ``products``."""


def tiles(spec: AttentionSpec) -> Tiles:
    """Returns the tile sizes for a call: the fastest on an H200 of those tried for 8 to 64 sequences of 8192 tokens."""
    rows, wide = rows_of(spec), max(spec.head_dim, spec.value_dim)
    if wide > 128:
        return Tiles(rows, 32, 4 if rows > TURNED_ROWS else 2, 2)
    if is_quantised(spec):
        return Tiles(rows, 128, 2, 2) if rows <= 16 else Tiles(rows, 64, 2, 3 if rows == 32 else 2)
    if rows == 16:
        return Tiles(16, 64, 2, 2) if wide > 64 else Tiles(16, 128, 4, 2)
    if rows == 128:
        # With 128 registers for each thread, two programs run at once, and one multiplies while the other adds.
        return Tiles(128, 64, 8, 2, 128) if _one_block(spec) and wide > 64 else Tiles(128, 64, 8, 3)
    return Tiles(rows, 64, 2 if rows == 32 else 4, 2 if rows == 64 else 3)


def is_quantised(spec: AttentionSpec) -> bool:
    """Returns whether the pages store quantised numbers."""
    return spec.paged is not None and spec.paged.dtype is not None


def _one_block(spec: AttentionSpec) -> bool:
    """Returns whether one tile holds all queries of a sequence, so that few programs each read many keys."""
    return (spec.max_len_q or 1) * spec.group_size <= rows_of(spec)


def rows_of(spec: AttentionSpec) -> int:
    """Returns the rows of a tile, queries times heads of a group: a power of two from 8 to 128.

    Quantised pages have smaller tiles. Triton 3.6 compiles a product of 64 rows in four warps to wgmma, and then reads
    converted values from the wrong shared memory: results are wrong, or the access is illegal.
    """
    rows, wide = (spec.max_len_q or 1) * spec.group_size, max(spec.head_dim, spec.value_dim)
    most = 64 if wide > 128 else 128  # wider tiles of 128 rows need too much memory
    least = 16
    if is_quantised(spec):
        # Pages that are not quantised are read at the speed of memory, whatever the products cost.
        most, least = most // 2, TURNED_ROWS
    return min(most, max(least, 1 << (rows - 1).bit_length()))


def splits(spec: AttentionSpec, multiprocessors: int) -> int:
    """Returns the number of splits of each sequence's keys. It depends on shapes alone, so equal calls run equally."""
    rows, sequences = rows_of(spec), spec.documents or 1
    programs = sequences * spec.num_kv_heads * -(-(spec.max_len_q or 1) * spec.group_size // rows)
    full = multiprocessors * PROGRAMS
    reach = band(spec).left
    keys = spec.max_len_k or spec.kv_len
    if reach is not None:  # a window bounds the keys that the queries of a sequence see together
        keys = min(keys, reach + (spec.max_len_q or 1))
    if is_quantised(spec) and rows <= 16:
        if spec.paged is not None and spec.paged.dtype == "int4":
            full = multiprocessors * PROGRAMS_OF_INT4
        # Lengths differ, and with three shares each the longest sequence does not run alone at the end.
        least = 3 if programs < 2 * full else 1
        fewest_keys = 2 * FEWEST_KEYS if 2 * programs <= full else 2 * SHARE
        count = min(_fewest_rounds(programs, full, least), -(-keys // fewest_keys))
    elif tiles(spec).registers is not None:  # a multiprocessor has room for two
        count = min(_fewest_rounds(programs, 2 * multiprocessors), -(-keys // SHARE))
    elif rows == 16:
        start = START * 256 / (spec.head_dim + spec.value_dim)
        count = _fastest(programs, keys, multiprocessors, start, TAIL if sequences > 1 else 0.0)
    else:
        even = min(-(-keys // (SHARE if rows < 128 else 2 * SHARE)), MOST_ROUNDS * full // max(programs, 1))
        count = max(even, min(full // 2 // max(programs, 1), -(-keys // (2 * FEWEST_KEYS))))
    return max(1, min(count, MOST_SPLITS))


def _fastest(programs: int, keys: int, multiprocessors: int, start: float, tail: float) -> int:
    """Returns the number of splits with the least predicted time, which is counted in keys of a program.

    Programs run in rounds. The last round may be too small to use all bandwidth. Merging a split takes about one key.
    Simulations of even and uneven lengths chose these terms; they are within 2 % of the best number in the mean.
    """
    full = multiprocessors * PROGRAMS

    def time(count: int) -> float:
        rounds, rest = divmod(programs * count, full)
        here, part = divmod(rest / multiprocessors, 1)
        speed = SPEEDS[int(here)] + part * (SPEEDS[int(here) + 1] - SPEEDS[int(here)])
        return (keys / count + start) * (rounds + (rest / full / speed if rest else 0)) + tail * keys / count + count

    return min(range(1, max(1, min(MOST_SPLITS, keys // FEWEST_KEYS)) + 1), key=time)


def _fewest_rounds(programs: int, at_once: int, least: int = 1) -> int:
    """Returns a number of splits, from the least on, that leaves few programs of a GPU idle in their last round.

    Args:
        at_once: how many programs the GPU runs at once, because of their registers or shared memory.
    """
    times = {count: -(-programs * count // at_once) / count for count in range(least, MOST_SPLITS + 1)}
    return min(count for count, time in times.items() if time <= 1.05 * min(times.values()))
