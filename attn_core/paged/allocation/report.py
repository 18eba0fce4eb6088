"""Reports how full a pool of pages is, in numbers and as a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple


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


class Occupancy:
    """The tokens and the readers of each page.

    Args:
        num_pages: pages of the pool; page_size: tokens in a page.
        sequences: (pages, tokens) of each sequence, by its name.
        cached: full pages of no sequence that are found by their content.

    Attributes:
        filled: the tokens in each page.
        readers: the names of the sequences that read each page.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        sequences: Mapping[Any, tuple[Sequence[int], int]],
        cached: Iterable[int] = (),
    ) -> None:
        self.page_size, self.cached = page_size, frozenset(cached)
        self.filled = [0] * num_pages  # sequences that share a page may end at different tokens in it
        self.readers: list[list[str]] = [[] for _ in range(num_pages)]
        for name, (pages, tokens) in sequences.items():
            for at, page in enumerate(pages):
                self.filled[page] = max(self.filled[page], min(page_size, tokens - at * page_size))
                self.readers[page].append(str(name))

    def report(self) -> PoolReport:
        """Returns how full the pool is."""
        counts = [len(names) for names in self.readers]
        free, shared, tokens = counts.count(0), sum(count > 1 for count in counts), sum(self.filled)
        return PoolReport(len(counts), free, shared, tokens, (len(counts) - free) * self.page_size - tokens)

    def __str__(self) -> str:
        """Draws a line for each page: # for each token, and the names of the sequences that read the page.

        A cached page belongs to no sequence and is found by its content.
        """
        report, size = self.report(), self.page_size
        used = report.num_pages - report.free
        lines = [f"{report.num_pages} pages of {size} tokens: {used} used, {report.shared} of them shared"]
        for page, (tokens, names) in enumerate(zip(self.filled, self.readers, strict=True)):
            state = ", ".join(names) or ("cached" if page in self.cached else "free")
            tokens = size if page in self.cached else tokens
            lines.append(f"{page:>5} |{'#' * tokens}{'.' * (size - tokens)}| {state}")
        return "\n".join(lines)
