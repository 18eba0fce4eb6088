"""prefetch: starts the exchange of the next group of heads before the current group computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


def prefetch(groups: int, start: Callable[[int], T]) -> Iterator[tuple[int, T]]:
    """Yields (group, ``start(group)``) in order, but calls ``start(group + 1)`` before it yields ``group``."""
    started = [start(0)]
    for group in range(groups):
        # Only one group ahead, because every started group holds its tensors in memory.
        if group + 1 < groups:
            started.append(start(group + 1))
        yield group, started.pop(0)  # keeps no reference, so that the caller can free the group's tensors
