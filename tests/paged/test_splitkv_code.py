"""The compiled code of the Triton kernels for pages. The interpreter finds no wrong type, and no slow instruction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from paged_specs import spec_of
from sm90_code import compiled

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from attn_core import AttentionSpec
from attn_core.backends import triton_splitkv
from attn_core.backends.shared import kernel_programs
from attn_core.backends.triton_splitkv import launches

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int8": "i8", "uint8": "u8"}
TYPES |= {"float8_e4m3fn": "fp8e4nv"}


def quantised(dtype: str, **fields: Any) -> AttentionSpec:
    spec = spec_of(**fields)
    assert spec.paged is not None
    return replace(spec, paged=replace(spec.paged, dtype=dtype, scales="token"))


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Callable[[AttentionSpec], list[Any]]:
    """Returns a function that compiles the kernels of a call for sm90: attend, and merge if the keys are split."""

    def build(spec: AttentionSpec) -> list[Any]:
        def step(kernel: Any, reads: Any, writes: Any, kinds: Any, how: Any) -> Any:
            types = [TYPES[str(kind).removeprefix("torch.")] for kind in kinds]
            return compiled(kernel, dict(zip(kernel.arg_names, types, strict=False)), how)

        monkeypatch.setattr(kernel_programs, "step", step)
        count = triton_splitkv.splits(spec, 132)
        tiles = triton_splitkv.tiles(spec)
        return list(triton_splitkv.program_of(spec, triton_splitkv.lower(spec), tiles, count).steps)

    return build


@pytest.mark.parametrize(
    "spec",
    [
        quantised("float8_e4m3fn"),
        quantised("int8", new=3, num_heads=64, sinks=True),
        quantised("int4"),
        quantised("float8_e4m3fn", head_dim=64, value_dim=128, new=3, window=(99, 0)),
        quantised("int4", head_dim=256, value_dim=256, softcap=3.0, num_heads=8),
    ],
    ids=["float8", "int8 drafts", "int4", "float8 drafts, window", "int4, wide"],
)
def test_quantised_pages_compile_without_wgmma(codes: Any, spec: AttentionSpec) -> None:
    """Triton 3.6 reads converted values from wrong memory for wgmma."""
    attend, *_ = codes(spec)
    assert "wgmma" not in attend.asm["ptx"] and "mma.sync" in attend.asm["ptx"]
    assert attend.metadata.shared <= 227 * 1024


def test_small_tiles_are_columns_of_products(codes: Any) -> None:
    """A product has 16 rows and 8 columns. Warps lie along its rows, which are keys, then channels."""
    turned, _ = codes(quantised("int8", num_heads=64))
    straight, _ = codes(quantised("int8", num_heads=72))
    assert "warpsPerCTA = [2, 1], instrShape = [16, 8]" in turned.asm["ttgir"]
    assert "warpsPerCTA = [1, 2], instrShape = [16, 8]" in straight.asm["ttgir"]


def test_two_programs_of_drafts_fit_on_a_multiprocessor(codes: Any) -> None:
    """Of 65536 registers, and of 227 KiB of shared memory."""
    attend, _ = codes(spec_of(batch=8, new=16, num_heads=64))
    assert "wgmma" in attend.asm["ptx"] and ".maxnreg 128" in attend.asm["ptx"]
    assert attend.metadata.num_warps == 8 and attend.metadata.shared <= 113 * 1024


@pytest.mark.parametrize(("count", "heads"), [(2, 4), (5, 1)])
def test_a_program_that_merges_has_several_heads_if_splits_are_few(count: int, heads: int) -> None:
    def described(spec: AttentionSpec) -> Any:
        parts, lse = torch.empty(count, *spec.out_shape), torch.empty(count, *spec.lse_shape)
        return launches.merge(spec, (parts, lse, lse, parts[0], lse[0]), count)

    grid, _, options = described(spec_of(batch=2))
    assert grid == (2, 32 // heads, 1) and (options["HEADS"], options["num_warps"]) == (heads, heads)
    assert described(spec_of(batch=2, num_heads=7, num_kv_heads=7))[2]["HEADS"] == 1
