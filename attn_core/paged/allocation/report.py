"""How full a pool of pages is, and how many pages were found by their content."""

from __future__ import annotations

from typing import NamedTuple


class PoolReport(NamedTuple):
    """The occupancy of a pool: num_pages, free and shared count pages, tokens and waste count tokens.

    Attributes:
        num_pages: pages of the pool; free: pages of no sequence; shared: pages of more than one sequence.
        tokens: tokens of the sequences; a token in a shared page counts once.
        waste: unused slots in the pages of sequences: less than a page for each sequence.
    """

    num_pages: int
    free: int
    shared: int
    tokens: int
    waste: int


class PrefixReport(NamedTuple):
    """How many pages were found by their content.

    Attributes:
        cached: pages of no sequence that ``match`` still finds.
        hits: full pages of prompts that ``allocate_matching`` found; misses: those that it did not find.
        evictions: cached pages that were taken for other content.
        evicted: the latest of these pages, oldest first, at most as many as the pool has pages.
    """

    cached: int
    hits: int
    misses: int
    evictions: int
    evicted: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        """The hits among all full pages of prompts, 0 to 1; 0 if there were none."""
        return self.hits / max(self.hits + self.misses, 1)
