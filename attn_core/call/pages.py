"""PagedKV: the static sizes of a pool of pages and of its block table."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.call.kinds import is_size
from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, shown


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The static sizes of a pool and its block table.

    Attributes:
        num_pages: pages in the pool; 0 is allowed.
        page_size: tokens in a page.
        width: columns of the block table: a sequence has at most ``width * page_size`` tokens.
    """

    num_pages: int
    page_size: int
    width: int

    def __post_init__(self) -> None:
        # An empty pool and an empty table are calls without keys. page_size divides positions, so it cannot be 0.
        for name, least in (("num_pages", 0), ("page_size", 1), ("width", 0)):
            value = getattr(self, name)
            if not is_size(value) or (is_host_int(value) and value < least):
                raise ShapeError(f"{name}={shown(value)}: expected {least} or more")

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence; 0 if the pool has no page."""
        return self.width * self.page_size if self.num_pages else 0
