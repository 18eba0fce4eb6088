"""PagedKV: the static sizes of a pool of pages and of its block table, and how its numbers are stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from attn_core.call.kinds import is_host_int, is_size
from attn_core.call.options import check_flag
from attn_core.errors import DTypeError, ShapeError, SpecError, shown

BITS = {"float8_e4m3fn": 8, "int8": 8, "int4": 4}
"""The dtypes of quantised pages, and the bits of a stored number. Two int4 numbers are one byte of a uint8 pool."""
SCALES = ("page", "token")
"""What has one scale for each kv head."""
SCALE_BYTES = 4
FLOAT_BITS = {"float64": 64, "float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True, kw_only=True)
class PagedKV:
    """The static sizes of a pool and its block table, and how the pool stores its numbers.

    Attributes:
        num_pages: pages in the pool; 0 is allowed.
        page_size: tokens in a page.
        width: columns of the block table: a sequence has at most ``width * page_size`` tokens.
        starts: whether each sequence has a first visible key, ``kv_starts``.
        dtype: "float8_e4m3fn", "int8" or "int4" for quantised pages, where a number is ``stored * scale``; None if the
            pool has the dtype of q.
        scales: whether each "page" or each "token" has a scale for each kv head; None if and only if dtype is None.
    """

    num_pages: int
    page_size: int
    width: int
    starts: bool = False
    dtype: str | None = None
    scales: str | None = None

    def __post_init__(self) -> None:
        # An empty pool and an empty table are calls without keys. page_size divides positions, so it cannot be 0.
        for name, least in (("num_pages", 0), ("page_size", 1), ("width", 0)):
            value = getattr(self, name)
            if not is_size(value) or (is_host_int(value) and value < least):
                raise ShapeError(f"{name}={shown(value)}: expected {least} or more")
        check_flag("starts", self.starts)
        # The types come first, because a comparison with an array is an array.
        if self.dtype is not None and not (isinstance(self.dtype, str) and self.dtype in BITS):
            raise DTypeError(
                f"dtype={shown(self.dtype)}: expected one of {', '.join(BITS)}, or None for the dtype of q"
            )
        is_kind = isinstance(self.scales, str) and self.scales in SCALES
        if not (self.scales is None if self.dtype is None else is_kind):
            expected = "None without a dtype" if self.dtype is None else f"one of {', '.join(SCALES)}"
            raise SpecError(f"scales={shown(self.scales)}: expected {expected}")

    def __repr__(self) -> str:
        names = ("num_pages", "page_size", "width", *(("starts",) if self.starts else ()))
        names += () if self.dtype is None else ("dtype", "scales")
        return f"PagedKV({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence; 0 if the pool has no page."""
        return self.width * self.page_size if self.num_pages else 0


def bytes_in_layer(dtype: str, kv_heads: int, dims: tuple[int, int], scales: float) -> float:
    """Returns the bytes of a token's keys and values in one layer; ``attn_core.bytes_per_token`` counts all layers.

    Args:
        dtype: of the numbers in the pool.
        dims: head_dim and value_dim.
        scales: how many float32 scales the key of a token and head has, and its value as many.
    """
    channels = sum(-(-dim * (FLOAT_BITS | BITS)[dtype] // 8) for dim in dims)  # int4 has two channels in a byte
    return kv_heads * (channels + 2 * SCALE_BYTES * scales)


def describe(paged: PagedKV, kv_heads: int, head_dim: int, value_dim: int, dtype: str) -> str:
    """Returns a sentence about the bytes of a token.

    Args:
        dtype: of q, which the pool has unless it is quantised.
    """
    scales = {None: 0.0, "token": 1.0, "page": 1.0 / paged.page_size}[paged.scales]
    size = bytes_in_layer(paged.dtype or dtype, kv_heads, (head_dim, value_dim), scales)
    if paged.dtype is None:
        return f"{dtype}, {size:g} bytes per token and layer"
    plain = bytes_in_layer(dtype, kv_heads, (head_dim, value_dim), 0)
    each = f"a scale per {paged.scales} and kv head"
    return f"{paged.dtype} with {each}, {size:g} bytes per token and layer ({plain} in {dtype})"


def describe_pages(spec: Any) -> str | None:
    """Returns how the pool of an ``AttentionSpec`` stores numbers, and the bytes of a token; None without pages."""
    if spec.paged is None:
        return None
    return describe(spec.paged, spec.num_kv_heads, spec.head_dim, spec.value_dim, spec.dtype)


def check_paged(spec: Any, paged: PagedKV) -> None:
    """Raises SpecError for an ``AttentionSpec`` with pages and an option that calls on pages cannot have."""
    # New queries are the last tokens of their sequence, so their diagonal ends at the last key.
    if not spec.packed or spec.alignment != "bottom_right" or spec.kv_len != paged.capacity:
        raise SpecError(
            "paged: expected documents, bottom-right alignment and kv_len = width * page_size "
            f"({paged.capacity}), got documents={spec.documents}, {spec.alignment}, kv_len={spec.kv_len}"
        )
    if paged.dtype is not None:
        _check_quantised(spec, paged)
    if spec.needs_backward:
        raise SpecError("paged: expected no backward, because keys and values in pages have no gradient; use no_grad")
    for name in ("mask_shape", "bias_shape"):
        if getattr(spec, name) is not None:
            raise SpecError(f"paged: expected no {name.removesuffix('_shape')}, got shape {getattr(spec, name)}")
    if spec.dropout:
        raise SpecError(f"dropout={spec.dropout}: expected 0, because keys and values in pages have no backward")


def _check_quantised(spec: Any, paged: PagedKV) -> None:
    if spec.dtype == "float64":  # scales and products are float32
        raise DTypeError(f"q: expected bfloat16, float16 or float32 with {paged.dtype} pages, got float64; cast it")
    for name in ("head_dim", "value_dim"):
        if paged.dtype == "int4" and getattr(spec, name) % 2:
            raise ShapeError(
                f"{name}={getattr(spec, name)}: expected an even number, because int4 pages have two a byte"
            )
