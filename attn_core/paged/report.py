"""Reports how full a pool of pages is, in numbers and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from attn_core.paged.allocator import PageAllocator


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


def report_of(allocator: PageAllocator) -> PoolReport:
    """Returns the report of an allocator's pool."""
    filled: dict[int, int] = {}
    holders: dict[int, int] = {}
    for name in allocator.sequences:
        length = allocator.length(name)
        for at, page in enumerate(allocator.pages(name)):
            filled[page] = max(filled.get(page, 0), min(allocator.page_size, length - at * allocator.page_size))
            holders[page] = holders.get(page, 0) + 1
    tokens = sum(filled.values())
    shared = sum(count > 1 for count in holders.values())
    waste = len(filled) * allocator.page_size - tokens
    return PoolReport(allocator.num_pages, allocator.free_pages, shared, tokens, waste)


def picture(allocator: PageAllocator) -> str:
    """Draws a line for each page: # for each token, and the names of the sequences that read the page."""
    report, size = report_of(allocator), allocator.page_size
    filled = [0] * allocator.num_pages
    readers: list[list[str]] = [[] for _ in range(allocator.num_pages)]
    for name in allocator.sequences:
        for at, page in enumerate(allocator.pages(name)):
            filled[page] = max(filled[page], min(size, allocator.length(name) - at * size))
            readers[page].append(str(name))
    used = allocator.num_pages - report.free
    lines = [f"{allocator.num_pages} pages of {size}: {used} held, {report.shared} of them by several"]
    for page, (tokens, names) in enumerate(zip(filled, readers, strict=True)):
        lines.append(f"{page:>5} |{'#' * tokens}{'.' * (size - tokens)}| {', '.join(names) or 'free'}")
    return "\n".join(lines)
