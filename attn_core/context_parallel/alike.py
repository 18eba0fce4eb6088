"""alike: a step as one packed call that every part makes, with other offsets and other keys in it.

A program that all devices share has a branch for each part whose tiles differ, and the host must know which one before
it can launch it. Where tiles are rectangles without a mask there is a call without branches: the rows in a few pieces,
each a document with the keys that it sees, which are copied one document after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from attn_core.context_parallel.call import ContextCall, tile_spec
from attn_core.context_parallel.places import among_all, slices
from attn_core.context_parallel.plan import Plan, Step
from attn_core.context_parallel.tiles import Segment, Tile
from attn_core.spec import AttentionSpec

Ranges = tuple[tuple[int, int], ...]
"""``[start, stop)`` of places, one after the other."""
MOST_RANGES = 64


class Alike(NamedTuple):
    """A step as one call.

    Attributes:
        spec: the packed call, over all places of a part's queries.
        cu_q: offsets of the documents in them, for all parts; cu_k: in the keys, for each part.
        keys: for each part the ranges of places of the keys, in the block of the step; of keys that were gathered, in
            what ``places.among_all`` counts. As many for each part, of which some may be empty.
    """

    spec: AttentionSpec
    cu_q: tuple[int, ...]
    cu_k: tuple[tuple[int, ...], ...]
    keys: tuple[Ranges, ...]


@lru_cache(maxsize=256)
def alike(call: ContextCall, step: Step) -> Alike | None:
    """The step as one call of all parts.

    None where it has a mask, a batch of several rows, unequal work, or keys in more than MOST_RANGES ranges.
    """
    plan, spec = call.plan, call.spec
    tiles = [tile for mine in step.tiles for tile in mine]
    if spec.batch != 1 or any(tile.left is not None or tile.right is not None for tile in tiles):
        return None
    rows = plan.inner * plan.q_layout.shard
    cuts = {0, rows, *(cut for tile in tiles for each in tile.segments for cut in (each.q_start, each.q_stop))}
    edges = sorted(cuts)
    found = [[_seen(mine, start) for start in edges[:-1]] for mine in step.tiles]
    lengths = [[sum(stop - start for start, stop in keys) for keys in mine] for mine in found]
    keys = [_ranges(plan, step, part, mine) for part, mine in enumerate(found)]
    count = max(map(len, keys))
    if len({sum(each) for each in lengths}) > 1 or count > MOST_RANGES:
        return None
    whole = tile_spec(spec, Tile((Segment(0, rows, 0, sum(lengths[0])),), None, None), *call.heads)
    longest = max(stop - start for start, stop in pairwise(edges)), max(map(max, lengths))
    return Alike(
        replace(whole, documents=len(edges) - 1, max_len_q=longest[0], max_len_k=longest[1]),
        tuple(edges),
        tuple(tuple(accumulate(each, initial=0)) for each in lengths),
        tuple((*each, *((0, 0),) * (count - len(each))) for each in keys),
    )


def _seen(tiles: Sequence[Tile], row: int) -> Ranges:
    """The ranges of keys that a row sees."""
    segments = (segment for tile in tiles for segment in tile.segments)
    return tuple((each.k_start, each.k_stop) for each in segments if each.q_start <= row < each.q_stop)


def _ranges(plan: Plan, step: Step, part: int, mine: Sequence[Ranges]) -> Ranges:
    """Where the keys of all documents of a part lie."""
    ranges = [keys for each in mine for keys in each]
    if not step.gathered or not ranges:
        return tuple(ranges)
    index = among_all(plan, part)
    return tuple(piece for keys in ranges for piece in slices(index[slice(*keys)], len(index) + 1) or ())
