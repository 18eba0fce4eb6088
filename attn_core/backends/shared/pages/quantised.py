"""Turns the stored numbers of quantised pages into float32 numbers, for torch backends that gather pages."""

from __future__ import annotations

from typing import Any

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.paged.quantised.numbers import real_numbers


def pools_and_scales(spec: AttentionSpec, inputs: PagedInputs) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Returns the pools of keys and values, each with its scales; float8 pools as bytes, which torch can index."""
    import torch

    assert spec.paged is not None
    k, v = inputs.k.detach(), inputs.v.detach()
    if spec.paged.dtype == "float8_e4m3fn":
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return (k, inputs.k_scales), (v, inputs.v_scales)


def in_slots(spec: AttentionSpec, inputs: PagedInputs, page: Any, offset: Any) -> tuple[Any, Any]:
    """Returns the keys and values in slots, ``[slots, kv_heads, dim]``: as in the pool, or float32 if quantised."""
    assert spec.paged is not None
    if spec.paged.dtype is None:
        k, v = (_slots(pool.detach(), page, offset) for pool in (inputs.k, inputs.v))
        return k, v
    import torch

    dtype, by_page = spec.paged.dtype, spec.paged.scales == "page"
    k, v = (
        real_numbers(
            torch, _slots(pool, page, offset), scales[page] if by_page else _slots(scales, page, offset), dtype
        )
        for pool, scales in pools_and_scales(spec, inputs)
    )
    return k, v


def _slots(pool: Any, page: Any, offset: Any) -> Any:
    """Returns ``pool[page, offset]``, by one index where the pages of the pool lie next to each other, which is faster.

    Elsewhere, as in a pool with keys and values in turns, joining the axes would copy the whole pool.
    """
    if pool.stride(0) == pool.shape[1] * pool.stride(1):
        return pool.flatten(0, 1)[page * pool.shape[1] + offset]
    return pool[page, offset]


def in_pages(spec: AttentionSpec, inputs: PagedInputs, pages: Any) -> tuple[Any, Any]:
    """Returns the keys and values of rows of pages ``[batch, width]`` as ``[batch, width * page_size, ...]``."""
    assert spec.paged is not None
    if spec.paged.dtype is None:
        k, v = (pool.detach()[pages].flatten(1, 2) for pool in (inputs.k, inputs.v))
        return k, v
    import torch

    dtype, size, by_page = spec.paged.dtype, spec.paged.page_size, spec.paged.scales == "page"
    k, v = (
        real_numbers(
            torch,
            pool[pages].flatten(1, 2),
            scales[pages].repeat_interleave(size, 1) if by_page else scales[pages].flatten(1, 2),
            dtype,
        )
        for pool, scales in pools_and_scales(spec, inputs)
    )
    return k, v


def working_dtype(spec: AttentionSpec) -> str:
    """Returns the dtype of a gathered call: float32 if the pages are quantised, because it rounds no number of them."""
    return spec.dtype if spec.paged is None or spec.paged.dtype is None else "float32"
