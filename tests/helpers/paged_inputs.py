"""Draws the inputs of a paged call, with NaN in every slot that no token has."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs


def inputs_of(spec: AttentionSpec, random: np.random.Generator, lengths: Any, new: Any) -> PagedInputs:
    """Draws the inputs of a paged call, with every sequence on pages scattered over the pool.

    Unused pages and the unused end of each last page are NaN, so that a kernel which reads them shows it.

    Args:
        lengths: tokens of each sequence, including the new ones.
        new: queries (new tokens) of each sequence.
    """
    paged = spec.paged
    assert paged is not None
    table = np.full((len(lengths), paged.width), -1, np.int32)  # -1: no page, which a kernel must never follow
    free = random.permutation(paged.num_pages).astype(np.int32)
    pools = [
        np.full((paged.num_pages, paged.page_size, spec.num_kv_heads, dim), np.nan)
        for dim in (spec.head_dim, spec.value_dim)
    ]
    firsts = [random.integers(0, length + 1) if paged.starts else 0 for length in lengths]
    for row, length, start in zip(table, lengths, firsts, strict=True):
        count = -(-length // paged.page_size)
        row[:count], free = free[:count], free[count:]
        for pool in pools:
            filled = pool[row[:count]].reshape(-1, *pool.shape[2:])
            filled[:length] = random.standard_normal((length, *pool.shape[2:]))
            filled[:start] = np.nan  # no query sees a key before the start
            pool[row[:count]] = filled.reshape(count, *pool.shape[1:])
    key_ranges = None
    if spec.key_ranges_shape is not None:  # near the token itself, so that they matter within a sequence
        near = np.arange(spec.q_len)[None, None, :, None]
        starts = near + random.integers(-4, 3, spec.key_ranges_shape[:4])
        stops = np.maximum(starts, starts + random.integers(-1, 8, spec.key_ranges_shape[:4]))
        key_ranges = np.stack([starts, stops], -1).clip(0, spec.q_len).astype(np.int32)
    cu_q = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return PagedInputs(
        q=random.standard_normal((int(cu_q[-1]), spec.num_heads, spec.head_dim)),
        k=pools[0],
        v=pools[1],
        sinks=random.standard_normal(spec.num_heads) if spec.sinks else None,
        cu_seqlens_q=cu_q,
        block_table=table,
        seq_lens=np.asarray(lengths, np.int32),
        key_ranges=key_ranges,
        alibi_slopes=None if spec.alibi_shape is None else random.uniform(0.0, 0.5, spec.alibi_shape),
        kv_starts=np.asarray(firsts, np.int32) if paged.starts else None,
    )
