"""Which aux arrays of a call have one row for each batch row, so that a part of the batch needs a part of them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any


def by_row(spec: Any) -> tuple[int, ...] | None:
    """Returns the numbers of the aux arrays whose first axis is the batch, if b has no other use in the functions.

    A part of the batch then computes the same with its part of these arrays. None if a function reads b in another way:
    a part must keep its place.
    """
    return _by_row(spec.mask_mod, spec.score_mod, spec.batch, tuple([entry.shape for entry in spec.aux]))


@lru_cache(maxsize=1024)
def _by_row(mask: Any, score: Any, batch: Any, shapes: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    trees = [tree for tree in (mask, score) if tree is not None]
    first, other = set[int](), set[int]()
    for tree in trees:
        for row in tree.rows:
            is_row = [tree.rows[operand].op == "b" for operand in row.operands]
            if row.op == "lookup":
                (first if is_row[:1] == [True] else other).add(int(row.value or 0))
                is_row = is_row[1:]
            if any(is_row):
                return None
        if tree.rows[-1].op == "b":
            return None
    fits = all(shapes[number][0] == batch for number in first)
    return tuple(sorted(first)) if fits and not first & other else None
