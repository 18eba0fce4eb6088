"""Where kernels read keys and values: the addresses of slots, and loads of what exists.

This module imports triton, so others import it only when they run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slot_at(page, slot, by_page, by_slot, NEAR: tl.constexpr, UNIT: tl.constexpr):
    """Returns where slots of pages begin in a pool, in 64 bits; strides are multiples of UNIT.

    NEAR says that the pool's size over UNIT fits 32 bits. Then nothing but the last product has 64 bits, so an address
    costs one or two instructions instead of seven.
    """
    if NEAR:
        at = (page * (by_page // UNIT) + slot * (by_slot // UNIT)).to(tl.int64) * UNIT
    else:
        at = page.to(tl.int64) * by_page + slot * by_slot
    return at


@triton.jit
def read(at, exists, ALL: tl.constexpr):
    """Loads what exists, and 0 elsewhere; ALL says that everything exists."""
    if ALL:
        loaded = tl.load(at)
    else:
        loaded = tl.load(at, mask=exists, other=0.0)  # 0 cannot become a float8
    return loaded


@triton.jit
def key_slots(table, place, is_key, num_pages, ALL: tl.constexpr, PAGE: tl.constexpr):
    """Returns the page and the slot of keys at places of a sequence; page 0 if PAGE is 0, without pages."""
    if PAGE == 0:
        page, slot = 0, place
    else:
        page = read(table + place // PAGE, is_key, ALL)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        slot = place % PAGE
    return page, slot


@triton.jit
def slots_at(page, slot, by_page, by_slot, NEAR: tl.constexpr, PAGE: tl.constexpr):
    """Returns where slots begin. With pages, or if NEAR, strides are multiples of 8."""
    if PAGE > 0:
        at = slot_at(page, slot, by_page, by_slot, NEAR, 8)
    elif NEAR:
        at = (slot * (by_slot // 8)).to(tl.int64) * 8
    else:
        at = slot.to(tl.int64) * by_slot
    return at


@triton.jit
def read_scales(at, is_key, page, slot, by_page, by_slot, NEAR: tl.constexpr):
    """Loads the scales of keys in slots of pages; ``at`` is the address of the first scale of their head."""
    return tl.load(at + slot_at(page, slot, by_page, by_slot, NEAR, 1), mask=is_key, other=0.0)
