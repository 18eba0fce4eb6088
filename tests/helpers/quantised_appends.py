"""Appends to pages as they are and to quantised ones, written by a loop over tokens, bit for bit.

Keys of quantised pages are rotated in float32, then quantised as numpy defines it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import quantised_numbers as quantised
import torch
from append_cases import Append
from quantised_cases import STORED, torch_pool

import torch_frontend

Kind = tuple[str, str] | None
"""(dtype, by) of quantised pages; None for pages in the dtype of the keys."""


@dataclass(frozen=True)
class Pools:
    """Pools of stored numbers and their scales, as numpy arrays: keys, then values."""

    pages: tuple[np.ndarray, np.ndarray]
    scales: tuple[np.ndarray, np.ndarray]
    dtype: str


def tensors_of(call: Append, pools: Pools | None) -> list[torch.Tensor]:
    """Copies of the pages, and of their scales if they are quantised."""
    if pools is None:
        return [call.k_pages.clone(), call.v_pages.clone()]
    return [torch_pool(pool) for pool in pools.pages] + [torch.from_numpy(each.copy()) for each in pools.scales]


def bits(array: Any) -> np.ndarray:
    """The bytes of pages or scales, of any framework."""
    if isinstance(array, torch.Tensor):
        flat = array.detach().cpu().contiguous().flatten()  # whose last stride is 1, whatever the shape
        return flat.view(torch.uint8).numpy().reshape(*array.shape[:-1], array.shape[-1] * array.itemsize)
    return np.ascontiguousarray(array).view(np.uint8)


def assert_written(results: Any, right: Any, says: str = "") -> None:
    """Raises AssertionError unless pages and scales have the same bits."""
    names = ("k_pages", "v_pages", "k_scales", "v_scales")[: len(right)]
    for name, found, wanted in zip(names, results, right, strict=True):
        np.testing.assert_array_equal(bits(found), bits(wanted), err_msg=f"{name} {says}")


def pools_of(call: Append, kind: Kind) -> Pools | None:
    """Pools with room for the tokens of a call; int8 in place of int4 if a width is odd."""
    if kind is None:
        return None
    dtype, by = kind
    if dtype == "int4" and (call.k.shape[2] % 2 or call.v.shape[2] % 2):
        dtype = "int8"
    random = np.random.default_rng(1)
    shape = call.k_pages.shape[:3]
    widths = [pool.shape[3] // (2 if dtype == "int4" else 1) for pool in (call.k_pages, call.v_pages)]
    pages = [random.integers(0, 100, (*shape, width)).astype(np.uint8).view(STORED[dtype]) for width in widths]
    counts = shape if by == "token" else shape[::2]
    scales = [random.uniform(0.5, 2.0, counts).astype(np.float32) / quantised.LARGEST[dtype] for _ in "kv"]
    return Pools((pages[0], pages[1]), (scales[0].astype(np.float32), scales[1].astype(np.float32)), dtype)


def expected(call: Append, pools: Pools | None, rotates: bool, rounds: bool = False) -> list[Any]:
    """The pages and scales afterwards. rounds: whether a rotated key is rounded to its dtype first, which is wrong."""
    if pools is None:
        return list(call.expected(rotates))
    dtype = pools.dtype
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
