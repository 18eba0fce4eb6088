"""Cuts a row for a causal window: every rank has as many tokens, and as many visible pairs.

The first tokens of a row see fewer keys than the window, so the first of equal contiguous pieces has less work. Here
each rank has one piece of these first tokens, so that their missing keys are shared evenly, and one piece of the rest.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

Range = tuple[int, int]
"""Positions ``[start, stop)``."""


def cut_for_window(length: int, world: int, window: int) -> tuple[tuple[Range, ...], ...]:
    """Returns each rank's positions as ranges, in rising order.

    Token i of the first W misses W - 1 - i keys, and the first x of them miss together about ``(W^2 - (W - x)^2) / 2``.
    So rank r of P begins at ``W (1 - sqrt(1 - r / P))``. Of the rest, the last rank has the piece that continues its
    first one, and then ranks 0, 1, ... follow: each has the keys that the rank after it sees, as in contiguous pieces.

    Args:
        window: the number of keys that a query sees, itself included.
    """
    reach = min(window, length)
    edges = [at * length // world for at in range(world + 1)]
    sizes = [stop - start for start, stop in pairwise(edges)]
    shares = [round(reach * (1 - (1 - rank / world) ** 0.5)) for rank in range(world + 1)]
    # A window that is much larger than a shard would give the last rank more first tokens than it may have.
    firsts = [min(stop - start, size) for (start, stop), size in zip(pairwise(shares), sizes, strict=True)]
    starts = list(accumulate(firsts, initial=0))
    order = [world - 1, *range(world - 1)]
    later = list(accumulate((sizes[rank] - firsts[rank] for rank in order), initial=starts[-1]))
    rests = dict(zip(order, pairwise(later), strict=True))
    return tuple(((starts[rank], starts[rank + 1]), rests[rank]) for rank in range(world))
