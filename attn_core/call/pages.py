"""PagedKV: the static sizes of a pool of pages and of its block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.call.kinds import is_size
from attn_core.call.options import check_flag
from attn_core.call.seq_info import is_host_int
from attn_core.errors import ShapeError, SpecError, shown


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The static sizes of a pool and its block table.

    Attributes:
        num_pages: pages in the pool; 0 is allowed.
        page_size: tokens in a page.
        width: columns of the block table: a sequence has at most ``width * page_size`` tokens.
        starts: whether each sequence has a first visible key, ``kv_starts``.
    """

    num_pages: int
    page_size: int
    width: int
    starts: bool = False

    def __post_init__(self) -> None:
        # An empty pool and an empty table are calls without keys. page_size divides positions, so it cannot be 0.
        for name, least in (("num_pages", 0), ("page_size", 1), ("width", 0)):
            value = getattr(self, name)
            if not is_size(value) or (is_host_int(value) and value < least):
                raise ShapeError(f"{name}={shown(value)}: expected {least} or more")
        check_flag("starts", self.starts)

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence; 0 if the pool has no page."""
        return self.width * self.page_size if self.num_pages else 0


def check_paged(spec: Any, paged: PagedKV) -> None:
    """Raises SpecError for an ``AttentionSpec`` with pages and an option that calls on pages cannot have."""
    # New queries are the last tokens of their sequence, so their diagonal ends at the last key.
    if not spec.packed or spec.alignment != "bottom_right" or spec.kv_len != paged.capacity:
        raise SpecError(
            "paged: expected documents, bottom-right alignment and kv_len = width * page_size "
            f"({paged.capacity}), got documents={spec.documents}, {spec.alignment}, kv_len={spec.kv_len}"
        )
    if spec.needs_backward:
        raise SpecError("paged: expected no backward, because keys and values in pages have no gradient; use no_grad")
    for name in ("mask_shape", "bias_shape"):
        if getattr(spec, name) is not None:
            raise SpecError(f"paged: expected no {name.removesuffix('_shape')}, got shape {getattr(spec, name)}")
    if spec.dropout:
        raise SpecError(f"dropout={spec.dropout}: expected 0, because keys and values in pages have no backward")
