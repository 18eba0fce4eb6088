"""Rings: the newest tokens of each sequence beside quantised pages, in the dtype of the queries.

``k_recent`` and ``v_recent`` are ``[rings, recent, kv_heads, dim]``. Row b of ``recent_rows`` (int32 ``[batch, 2]``)
is (ring, first) of sequence b: its ring, -1 for none, and the first position that the ring is good for. The token at
position p lies in slot ``p % recent``. A key at a position from ``max(first, seq_len - recent)`` on is read from the
ring, and earlier ones from the pages, which have every token.

The ring of a sequence contains the last ``recent`` tokens that were written through it, so ``first`` is the position at
which its first token was written, and higher after newer tokens were taken back: at least ``longest - recent``, where
longest was the length before. That is how a slot that a rejected token has overwritten is never read. A ring outside of
``k_recent`` counts as none, so wrong values on a device read the pages.
"""

from __future__ import annotations

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.errors import DTypeError, ShapeError, SpecError
from attn_core.paged.quantised.scales import channels, page_dtype
from attn_core.paged.tables import check_table_types, positions_of

RING = ("k_recent", "v_recent", "recent_rows")
"""The arguments of a call with rings; all of them or none."""


def check_rings(
    named: dict[str, ArrayFacts | None], beside: dict[str, tuple[str, ArrayFacts]], batch: int | None
) -> int | None:
    """Returns the tokens of a ring; None for a call without rings.

    Args:
        named: the arrays of a call by their names.
        beside: for "k" and "v" the array whose dtype the ring has, with its name.
        batch: the sequences of the block table; None without one.

    Raises:
        SpecError, ShapeError, DTypeError: naming the argument.
    """
    rings = {name: named.get(name) for name in RING}
    some = next((name for name, facts in rings.items() if facts is not None), None)
    if some is None:
        return None
    pool = named["k_pages"]
    assert pool is not None
    if page_dtype(pool) is None:
        raise SpecError(f"{some}: expected None, because pages in {pool.dtype} are exact; quantised ones have rings")
    if batch is None:
        raise SpecError(f"{some}: expected None with slot_mapping, which does not say positions; pass the tables")
    for name, facts in rings.items():
        if facts is None:
            raise SpecError(f"{name}: expected an array because {some} is one, got None; pass {', '.join(RING)}")
        if name != "recent_rows":
            _check_ring(name, facts, named, *beside[name[0]])
    k, v, rows = (rings[name] for name in RING)
    assert k is not None and v is not None and rows is not None
    if v.shape[:2] != k.shape[:2]:
        raise ShapeError(f"v_recent: expected the rings of k_recent, {list(k.shape[:2])}, got {list(v.shape[:2])}")
    if rows.dtype != "int32":
        raise DTypeError(f"recent_rows: expected dtype int32, got {rows.dtype}; cast it to int32")
    check_table_types("recent_rows", "int32", rows.shape, (batch, 2))
    return k.shape[1]


def _check_ring(
    name: str, ring: ArrayFacts, named: dict[str, ArrayFacts | None], other: str, beside: ArrayFacts
) -> None:
    pool = named[f"{name[0]}_pages"]
    assert pool is not None
    own = (pool.shape[2], channels(pool))
    if len(ring.shape) != 4 or 0 in ring.shape[:2] or ring.shape[2:] != own:
        expected = f"[rings, recent, {own[0]}, {own[1]}], both 1 or more"
        raise ShapeError(f"{name}: expected shape {expected}, got {list(ring.shape)}")
    if ring.dtype != beside.dtype:
        raise DTypeError(f"{name}: expected the dtype of {other}, {beside.dtype}, got {ring.dtype}; cast it")


def check_recent_rows(recent_rows: np.ndarray, seq_lens: np.ndarray, rings: int) -> None:
    """Raises SpecError for a ring on the host that does not exist, or a first position outside of its sequence."""
    ring, first = recent_rows.T
    if (wrong := (ring < -1) | (ring >= rings)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"recent_rows[{at}, 0]={ring[at]}: expected 0 to {rings - 1}, because k_recent has {rings} rings, or -1 "
            "for a sequence without one"
        )
    if (wrong := (first < 0) | (first > seq_lens)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"recent_rows[{at}, 1]={first[at]}: expected 0 to {seq_lens[at]}, the length of the sequence; its ring is "
            "good from this position on"
        )


def places_in_rings(
    recent_rows: np.ndarray, seq_lens: np.ndarray, cu_seqlens_q: np.ndarray | None, recent: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns int64 (token, ring, slot) of every new token that a ring gets; for checked tables and values.

    Tokens of a long prompt whose slots newer ones take are left out.

    Raises:
        SpecError: if two sequences with new tokens have one ring.
    """
    lengths = np.asarray(seq_lens, np.int64)
    ends = np.arange(len(lengths) + 1) if cu_seqlens_q is None else np.asarray(cu_seqlens_q, np.int64)
    counts = ends[1:] - ends[:-1]
    position, sequence = positions_of(lengths, cu_seqlens_q), np.repeat(np.arange(len(lengths)), counts)
    rings = np.asarray(recent_rows, np.int64)[:, 0]
    used, times = np.unique(rings[(rings >= 0) & (counts > 0)], return_counts=True)
    if (times > 1).any():
        raise SpecError(
            f"recent_rows: expected a ring of its own for each sequence with new tokens, but ring "
            f"{int(used[np.argmax(times > 1)])} has {int(times.max())}"
        )
    token = np.flatnonzero((rings[sequence] >= 0) & (position >= lengths[sequence] - recent))
    return token, rings[sequence[token]], position[token] % recent
