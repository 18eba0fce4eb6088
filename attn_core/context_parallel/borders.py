"""The border of a step: the few places of a block of keys that any part sees, if a window or documents hide the rest.

Only the border is sent, straight from the part that holds it. Static, and the same for every part, because all messages
of a step have one size and one JAX program runs on all devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from attn_core.context_parallel.bands import Segment
from attn_core.context_parallel.layout import Block, Run
from attn_core.context_parallel.tiles import Tile

Border = tuple[tuple[int, int], ...]
"""Ranges ``[start, stop)`` of a block's places, rising and apart."""
Tiles = tuple[tuple[Tile, ...], ...]
"""The tiles of each part."""

MAX_RANGES = 16
"""The most ranges of a border. More are not worth their copies, and the whole block travels."""
WORTH = 7 / 8
"""The largest share of a block that travels as a border. A block that moves on from part to part needs fewer links."""


def find_border(tiles: Tiles, places: int) -> Border | None:
    """Returns the places of a block of keys that some part sees; None if the block should travel as a whole.

    Args:
        places: of the largest block.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted((each.k_start, each.k_stop) for each in _segments(tiles)):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    if len(joined) > MAX_RANGES or size(joined) > WORTH * places:
        return None
    return tuple(joined)


def size(border: Sequence[tuple[int, int]]) -> int:
    """Returns the number of places of a border."""
    return sum(stop - start for start, stop in border)


@lru_cache(maxsize=256)
def places(border: Border) -> np.ndarray:
    """Returns int64: the places of a border in the block, in order."""
    return np.concatenate([np.arange(start, stop) for start, stop in border])


def number_within(tiles: Tiles, border: Border) -> Tiles:
    """Returns the same tiles with keys numbered by their places in the border instead of in the block."""
    return tuple(tuple(_numbered(tile, border) for tile in of_part) for of_part in tiles)


def _numbered(tile: Tile, border: Border) -> Tile:
    """Returns a tile whose keys count from the front of the border: they move by the gaps of the border before them."""
    # Each segment lies in one range, because ranges are unions of segments. So only its distance to the front changes,
    # and its window, which counts from its own last key, stays.
    segments = []
    for segment in tile.segments:
        before = 0
        for start, stop in border:
            if segment.k_start < stop:
                break
            before += stop - start
        shift = before - start
        segments.append(segment._replace(k_start=segment.k_start + shift, k_stop=segment.k_stop + shift))
    return tile._replace(segments=tuple(segments))


def cut(block: Block, border: Border) -> Block:
    """Returns the positions of a block at the places of a border. The last places of a short block hold none."""
    runs, place = [], 0
    for run in block.runs:
        for start, stop in border:
            first, last = max(start - place, 0), min(stop - place, run.count)
            if first < last:
                runs.append(Run(run.start + first * run.stride, last - first, run.stride))
        place += run.count
    return Block(tuple(runs), block.ranks)


def _segments(tiles: Tiles) -> Iterable[Segment]:
    return (segment for of_part in tiles for tile in of_part for segment in tile.segments)
