"""Quantises the keys and values of new tokens, as ``attn_core.paged.quantised`` defines it, in torch operations."""

from __future__ import annotations

import torch

from attn_core.paged.quantised.numbers import (
    HIGHEST_SCALE,
    LARGEST,
    OF_PAGES,
    OF_TOKENS,
    SMALLEST,
    Quotient,
    round_magnitude,
)
from attn_core.paged.quantised.scales import STORED

Tensor = torch.Tensor


def write(pages: Tensor, scales: Tensor | None, places: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Writes rows ``[tokens, kv_heads, dim]`` to their pages and offsets, quantised if there are scales."""
    if scales is None:
        pages.index_put_(places, rows)
        return
    dtype = STORED[str(pages.dtype).removeprefix("torch.")]
    if scales.dim() == 3:
        new, factors = token_scales(rows, dtype)
        scales.index_put_(places, new)
    else:
        factors = page_factors(scales[places[0]])
    # torch can index bytes; not every version can index float8.
    bytes_of = pages.view(torch.uint8) if dtype == "float8_e4m3fn" else pages
    bytes_of.index_put_(places, stored_numbers(rows, factors, dtype))


def token_scales(rows: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Returns (scales, factors), float32 ``[tokens, kv_heads]``, of rows ``[tokens, kv_heads, dim]``."""
    magnitude = rows.float().abs().amax(-1)
    finite = magnitude.isfinite()
    rounded, factors = _divide(torch.where(finite, magnitude, 1.0).clamp(min=SMALLEST), OF_TOKENS[dtype])
    scales = rounded * torch.tensor(1 / LARGEST[dtype], dtype=torch.float32, device=rows.device)
    return torch.where(finite, scales, torch.nan), torch.where(finite, factors, 0.0)


def page_factors(scales: Tensor) -> Tensor:
    """Returns the factors of the caller's scales; 0 for a scale that is not positive and finite."""
    usable = scales.isfinite() & (scales > 0)
    safe = torch.where(usable, scales, 1.0).clamp(SMALLEST, HIGHEST_SCALE)
    return torch.where(usable, _divide(safe, OF_PAGES)[1], 0.0)


def stored_numbers(rows: Tensor, factors: Tensor, dtype: str) -> Tensor:
    """Returns what the pool stores: uint8 for float8 (its bits) and int4, int8 for int8."""
    factors = factors[..., None]
    product = torch.where(factors == 0, 0.0, rows.float() * factors).clamp(-LARGEST[dtype], LARGEST[dtype])
    if dtype == "float8_e4m3fn":
        return product.to(torch.float8_e4m3fn).view(torch.uint8)
    stored = product.nan_to_num(nan=0.0).round().to(torch.int8)  # half to even
    if dtype == "int8":
        return stored
    low, high = (stored.view(torch.uint8) & 15).chunk(2, -1)
    return low | (high << 4)


def _divide(magnitude: Tensor, by: Quotient) -> tuple[Tensor, Tensor]:
    """Returns (the rounded magnitudes, the factors)."""
    rounded, quotient = round_magnitude(magnitude.view(torch.int32).clamp(max=by.most), by)
    factors = quotient.float().view(torch.int32) + ((by.exponent - (rounded >> 23)) << 23)
    return rounded.view(torch.float32), factors.view(torch.float32)
