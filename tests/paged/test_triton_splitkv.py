"""The claims and launch parameters of our Triton kernel. ``test_triton_interpreted`` runs the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from paged_specs import spec_of

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import triton_splitkv
from attn_core.backends.shared.in_order.order import grid_of
from attn_core.backends.triton_splitkv import launches
from attn_core.paged.quantised import KINDS

GPU = Target("torch", "sm90")


def with_starts() -> AttentionSpec:
    spec = spec_of()
    assert spec.paged is not None
    return replace(spec, paged=replace(spec.paged, starts=True))


# Claims


def reasons(spec: AttentionSpec) -> tuple[str, ...]:
    return explain(spec, GPU, "triton_splitkv").reasons("triton_splitkv")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"dtype": "float16", "page_size": 1},
        {"page_size": 3, "head_dim": 64, "value_dim": 256},
        {"new": 7, "window": (99, 0), "softcap": 30.0, "sinks": True, "return_lse": True},
        {"head_dim": 16, "value_dim": 32, "num_heads": 5, "num_kv_heads": 1, "deterministic": True},
    ],
)
def test_supported_calls_are_not_refused(fields: dict[str, Any]) -> None:
    assert reasons(spec_of(**fields)) == ()


@pytest.mark.parametrize("spec", [spec_of(alibi_shape=(32,)), spec_of(alibi_shape=(64, 32)), with_starts()], ids=str)
@pytest.mark.parametrize("target", [GPU, Target("jax", "sm90"), Target("torch", "sm80")], ids=str)
def test_slopes_and_starts_run_here_and_are_refused_by_name_elsewhere(spec: AttentionSpec, target: Target) -> None:
    what = "kv_starts of sequences in pages: " if spec.alibi_shape is None else "alibi_slopes with pages: "
    assert explain(spec, target, "triton_splitkv").reasons("triton_splitkv") == ()
    for name in ("flash2", "flash3", "flash4"):
        assert any(why.startswith(what) for why in explain(spec, target, name).reasons(name)), name


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dtype": "float32"}, "dtype float32: the Triton split-KV kernel takes bfloat16, float16"),
        ({"head_dim": 80, "value_dim": 80}, "head_dim=80: the Triton split-KV kernel takes powers of two from 16 on"),
        ({"value_dim": 8}, "value_dim=8: the Triton split-KV kernel takes powers of two from 16 on"),
        ({"head_dim": 512, "value_dim": 512}, "head_dim=512: the Triton split-KV kernel stops at 256"),
        (
            {"paged": None},
            "keys and values not in pages: the Triton split-KV kernel reads only pages",
        ),
        (
            {"batch": 1, "tokens": 2**22, "new": 2**22, "num_heads": 8},
            "max_len_q=4194304: the Triton split-KV kernel launches at most 65534 blocks, not 65536",
        ),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], says: str) -> None:
    if "num_heads" in fields:  # two query heads for each of four kv heads
        fields = {**fields, "num_kv_heads": 4}
    assert says in reasons(spec_of(**fields))


def test_a_cpu_is_not_supported() -> None:
    actual = explain(spec_of(), Target("torch", "cpu"), "triton_splitkv").reasons("triton_splitkv")
    assert "device cpu: the Triton split-KV kernel needs cuda" in actual


# The launch


def test_the_numbers_that_the_kernels_receive() -> None:
    assert triton_splitkv.lower(spec_of(softcap=20.0, window=(5, None), sinks=True, scale=0.3)) == {
        **{"scale": 0.3, "softcap": 20.0, "left": 5, "right": 0},
        **{"ONE_QUERY": True, "SOFTCAP": True, "SINKS": True, "RANGES": 0, "ALIBI": False, "STARTS": False},
        **{"LEFT_OPEN": False, "FUSED": False, "KIND": 0},
    }
    assert triton_splitkv.lower(spec_of(alibi_shape=(64, 32)))["ALIBI"]
    assert triton_splitkv.lower(with_starts())["STARTS"]
    for dtype, kind in KINDS.items():
        pool = replace(spec_of().paged, dtype=dtype, scales=None if dtype is None else "token")
        assert triton_splitkv.lower(replace(spec_of(), paged=pool))["KIND"] == kind
    assert triton_splitkv.lower(spec_of(new=3, key_ranges_shape=(1, 1, 192, 2, 2)))["RANGES"] == 2
    open_sides = triton_splitkv.lower(spec_of(new=3, causal=False))
    assert open_sides["left"] == open_sides["right"] == 2**30 and not open_sides["ONE_QUERY"]


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (spec_of(), 16),
        (spec_of(new=5), 32),
        (spec_of(new=16), 64),
        (spec_of(new=500), 128),
        (spec_of(num_kv_heads=32), 16),
        (spec_of(num_kv_heads=1), 32),
    ],
)
def test_a_tile_holds_the_queries_of_a_group(spec: AttentionSpec, rows: int) -> None:
    assert triton_splitkv.tiles(spec).rows == rows


def quantised(spec: AttentionSpec, dtype: str) -> AttentionSpec:
    assert spec.paged is not None
    return replace(spec, paged=replace(spec.paged, dtype=dtype, scales="token"))


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_quantised_pages_never_take_wgmma(dim: int) -> None:
    """Triton 3.6 compiles products of 64 rows in four warps to wgmma, and reads converted values from wrong memory."""
    for new in (1, 2, 3, 5, 8, 16, 40, 512):
        for heads in (8, 32, 40, 64, 128):
            for dtype in KINDS.keys() - {None}:
                spec = spec_of(new=new, num_heads=heads, head_dim=dim, value_dim=dim)
                tile = triton_splitkv.tiles(quantised(spec, str(dtype)))
                # The keys are the rows of products that are turned around.
                assert tile.rows in (16, 32) or (tile.rows in (8, 64) and tile.warps < 4)


def test_splits_of_quantised_pages_and_drafts_fill_the_rounds_of_a_gpu() -> None:
    """132 multiprocessors run 528 programs of int8 pages, 792 of int4 pages, or 264 of 128 rows at once."""
    for dtype, counts in (("int8", (3, 4, 4, 8, 32, 1)), ("int4", (3, 3, 6, 12, 32, 3))):
        for batch, count in zip((64, 32, 16, 8, 1, 512), counts, strict=True):
            assert triton_splitkv.splits(quantised(spec_of(batch=batch), dtype), 132) == count
    assert triton_splitkv.splits(quantised(spec_of(batch=128, tokens=2048), "int8"), 132) == 1, "keys are too few"
    assert triton_splitkv.splits(quantised(spec_of(batch=1, tokens=256), "int4"), 132) == 1
    assert triton_splitkv.splits(quantised(spec_of(batch=100, tokens=1024), "int4"), 132) == 1, (
        "there are programs enough"
    )
    drafts = spec_of(batch=8, new=16, num_heads=64)
    assert triton_splitkv.tiles(drafts) == (128, 64, 8, 2, 128) and triton_splitkv.splits(drafts, 132) == 4
    assert triton_splitkv.tiles(spec_of(new=512)).keys == 64


def test_the_number_of_splits_fills_a_gpu() -> None:
    one = spec_of(batch=1, tokens=131072)
    assert triton_splitkv.splits(spec_of(batch=512), 132) == 1, "there are programs enough"
    assert 1 < triton_splitkv.splits(one, 132) <= launches.MOST_SPLITS
    assert triton_splitkv.splits(spec_of(batch=1, tokens=launches.FEWEST_KEYS), 132) == 1, "too few keys to be worth it"
    assert triton_splitkv.splits(replace(one, window=(launches.FEWEST_KEYS - 1, 0)), 132) == 1, (
        "a window leaves few keys"
    )
    assert triton_splitkv.splits(one, 1) <= triton_splitkv.splits(one, 132)
    assert triton_splitkv.splits(one, 10**6) <= launches.MOST_SPLITS


MEASURED = {
    (16, 6000): (165.0, 106.2, 99.7, 98.6, 117.7, 105.7, 102.2, 100.5, 106.8, 109.0, 105.0, 103.3),
    (12, 7000): (183.3, 112.2, 95.1, 88.7, 88.4, 106.5, 102.1, 94.7, 94.4, 92.1, 91.9, 91.3),
    (20, 4000): (121.8, 88.5, 85.1, 100.9, 89.5, 88.2, 96.9, 90.9, 90.7, 91.3, 92.3, 92.3),
    (8, 9000): (224.1, 128.1, 97.7, 83.6, 80.7, 78.1, 77.5, 77.2, 94.1, 95.0, 87.6, 84.0),
    (28, 4500): (144.9, 128.2, 147.7, 130.4, 138.3, 132.5, 131.2, 135.7, 133.4, 130.9, 137.7, 138.3),
    (18, 9000): (257.2, 172.3, 161.0, 204.5, 177.8, 163.5, 161.9, 176.2, 168.6, 166.8, 163.5, 169.8),
    (56, 3500): (190.1, 193.5, 197.3, 201.4, 204.3, 199.2, 199.6, 201.3, 202.3, 203.0, 207.0, 206.9),
    (14, 12000): (314.2, 191.7, 171.1, 167.0, 214.7, 192.4, 173.4, 168.0, 167.7, 188.1, 184.3, 172.1),
}
"""Microseconds of decoding (sequences, keys) of 32/8 heads with 1 to 12 splits, on an H200 on 2026-11-28."""


@pytest.mark.parametrize("shape", MEASURED)
def test_splits_fill_whole_rounds_of_a_gpu(shape: tuple[int, int]) -> None:
    count = triton_splitkv.splits(spec_of(batch=shape[0], tokens=shape[1]), 132)
    assert MEASURED[shape][count - 1] <= 1.05 * min(MEASURED[shape])


def test_sequences_of_unequal_lengths_have_several_rounds() -> None:
    """Lengths are on the GPU, so the call cannot know them, and the longest sequence must not end alone."""
    assert triton_splitkv.splits(spec_of(batch=64, tokens=8192, num_kv_heads=4, num_heads=28), 132) == 6
    assert triton_splitkv.splits(spec_of(batch=12, tokens=16000), 132) == 11
    assert triton_splitkv.splits(spec_of(batch=8, tokens=1024), 132) == 6, "smaller shares fill the GPU"


def test_the_number_of_splits_depends_only_on_shapes() -> None:
    """Only the spec and the device decide, so equal calls give equal bits."""
    assert triton_splitkv.splits(spec_of(), 132) == triton_splitkv.splits(spec_of(), 132)
    assert triton_splitkv.FORWARD.deterministic and triton_splitkv.BACKEND.backward_claims is None


@pytest.mark.parametrize(
    ("one_query", "shares", "grid"),
    [(True, 0, (512, 1, 3)), (True, 8, (512, 8, 3)), (False, 0, (512, 1, 4)), (False, 8, (512, 9, 3))],
)
def test_programs_that_clear_the_tail_come_last(one_query: bool, shares: int, grid: tuple[int, int, int]) -> None:
    """Programs of sequences come before them, so that every multiprocessor has as many as in a call without tail."""
    assert grid_of(spec_of(), one_query, shares, 3) == grid
