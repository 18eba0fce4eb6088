"""The tiles and splits of the Triton kernel for pages, on shapes alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
from dataclasses import replace

from paged_cases import make_paged

from attn_core.backends.triton_splitkv import shares
from attn_core.call.spec import AttentionSpec

DTYPES = (None, "float8_e4m3fn", "int8", "int4")


def spec_of(dtype: str | None, queries: int, group: int, dim: int, sequences: int = 4, keys: int = 8192) -> AttentionSpec:
    call = make_paged((5, 9), (1, 1), head_dim=16, value_dim=16)
    assert call.spec.paged is not None
    pool = replace(call.spec.paged, dtype=dtype, scales=None if dtype is None else "token")
    sizes = {"num_heads": 8 * group, "num_kv_heads": 8, "head_dim": dim, "value_dim": dim}
    return replace(
        call.spec, **sizes, paged=pool, documents=sequences, max_len_q=queries, max_len_k=keys, q_len=queries * sequences
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_quantised_pages_never_take_wgmma(dtype: str | None, dim: int) -> None:
    """Triton 3.6 compiles products of 64 rows in four warps to wgmma, and reads converted values from wrong memory."""
    for queries in (1, 2, 3, 5, 8, 16, 40, 512):
        for group in (1, 4, 5, 8, 16):
            tile = shares.tiles(spec_of(dtype, queries, group, dim))
            assert tile.rows >= 16 and tile.rows & (tile.rows - 1) == 0
            assert dtype is None or tile.rows < 64 or tile.warps < 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_cover_the_keys_and_fill_the_gpu(dtype: str | None) -> None:
    for sequences in (1, 2, 4, 16, 32, 64, 100, 512):
        for keys in (1, 100, 256, 4000, 8192, 131072):
            for queries in (1, 16, 300):
                count = shares.splits(spec_of(dtype, queries, 4, 128, sequences, keys), 132)
                assert 1 <= count <= shares.MOST_SPLITS
                assert count == 1 or count <= -(-keys // shares.FEWEST_KEYS)
