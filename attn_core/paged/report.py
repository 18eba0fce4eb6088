"""How full a pool of pages is: in numbers, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from attn_core.paged.allocator import PageAllocator


class PoolReport(NamedTuple):
    """How full a pool is, in pages but for the last two, which are tokens.

    Attributes:
        num_pages: of the pool; free: those that nobody holds; shared: those that more than one sequence holds.
        tokens: held by the sequences, a token in a shared page once.
        waste: places for tokens in held pages that hold none: less than a page for each sequence.
    """

    num_pages: int
    free: int
    shared: int
    tokens: int
    waste: int


def report_of(allocator: PageAllocator) -> PoolReport:
    """The report of an allocator's pool."""
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
    """A line for each page, # for a place that holds a token, and who reads it."""
    report, size = report_of(allocator), allocator.page_size
    filled = [0] * allocator.num_pages
    readers: list[list[str]] = [[] for _ in range(allocator.num_pages)]
    for name in allocator.sequences:
        for at, page in enumerate(allocator.pages(name)):
            filled[page] = max(filled[page], min(size, allocator.length(name) - at * size))
            readers[page].append(str(name))
    held = allocator.num_pages - report.free
    lines = [f"{allocator.num_pages} pages of {size}: {held} held, {report.shared} of them by several"]
    for page, (tokens, names) in enumerate(zip(filled, readers, strict=True)):
        lines.append(f"{page:>5} |{'#' * tokens}{'.' * (size - tokens)}| {', '.join(names) or 'free'}")
    return "\n".join(lines)
