"""Appends to quantised pages, written by a loop over tokens: rotated in float32, then quantised as numpy defines it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import quantised_numbers as quantised
import torch
from append_cases import Append
from quantised_cases import STORED, torch_pool

import torch_frontend


@dataclass(frozen=True)
class Pools:
    """Pools of stored numbers and their scales, as numpy arrays: keys, then values."""

    pages: tuple[np.ndarray, np.ndarray]
    scales: tuple[np.ndarray, np.ndarray]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Copies of all four as tensors."""
        return [torch_pool(pool) for pool in self.pages] + [torch.from_numpy(each.copy()) for each in self.scales]


def bits(array: Any) -> np.ndarray:
    """The bytes of pages or scales, of any framework."""
    if isinstance(array, torch.Tensor):
        array = (array.view(torch.uint8) if array.itemsize == 1 else array).numpy()
    return np.ascontiguousarray(array).view(np.uint8)


def pools_of(call: Append, dtype: str, by: str) -> Pools:
    """Pools with room for the tokens of a call; int4 needs even widths."""
    random = np.random.default_rng(1)
    shape = call.k_pages.shape[:3]
    widths = [pool.shape[3] // (2 if dtype == "int4" else 1) for pool in (call.k_pages, call.v_pages)]
    pages = [random.integers(0, 100, (*shape, width)).astype(np.uint8).view(STORED[dtype]) for width in widths]
    counts = shape if by == "token" else shape[::2]
    scales = [random.uniform(0.5, 2.0, counts).astype(np.float32) / quantised.LARGEST[dtype] for _ in "kv"]
    return Pools((pages[0], pages[1]), (scales[0].astype(np.float32), scales[1].astype(np.float32)))


def expected(call: Append, pools: Pools, dtype: str, rotates: bool, rounds: bool = False) -> list[np.ndarray]:
    """The pages and scales afterwards. rounds: whether a rotated key is rounded to its dtype first, which is wrong."""
    pages, scales = [pool.copy() for pool in pools.pages], [each.copy() for each in pools.scales]
    for token, place in enumerate(call.places):
        if place is None:
            continue
        page, offset, position = place
        key = call.k[token] if rounds else call.k[token].float()
        if rotates:
            options = {"positions": np.array(position), "interleaved": call.interleaved}
            key = torch_frontend.apply_rotary(key, call.cos, call.sin, **options)
        for rows, pool, scale in zip((key, call.v[token]), pages, scales, strict=True):
            numbers = rows.float().numpy()
            if scale.ndim == 3:
                scale[page, offset], factors = quantised.token_scales(numbers, dtype)
            else:
                factors = quantised.page_factors(scale[page])
            stored = quantised.stored_numbers(numbers, factors, dtype)
            pool[page, offset] = quantised.pack_int4(stored) if dtype == "int4" else stored.astype(STORED[dtype])
    return pages + scales
