"""Tests the number of pages that fit into memory, against the bytes of real pools."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework

from attn_core import DeviceError, DTypeError, SpecError, bytes_per_token, pages_that_fit
from attn_core.paged.pools import BITS, SCALED

SIZES = {"num_layers": 3, "kv_heads": 2, "head_dim": 24, "value_dim": 17}
everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


@everywhere
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_bytes_are_those_of_the_pools(framework: Framework, dtype: str, request: pytest.FixtureRequest) -> None:
    if framework.name == "jax" and dtype == "float64":
        pytest.skip("JAX has no float64 without a flag")
    there = getattr(torch if framework.name == "torch" else jnp, dtype)
    cache = framework.frontend.PagedKVCache(num_pages=5, page_size=7, **SIZES, dtype=there)
    actual = sum(pool.nbytes for pool in (*cache.k_pages, *cache.v_pages))
    assert actual == 5 * 7 * bytes_per_token(**SIZES, dtype=dtype)
    for name in (dtype, there):
        count = framework.frontend.pages_that_fit
        assert count(actual, page_size=7, **SIZES, dtype=name) == 5
        assert count(actual - 1, page_size=7, **SIZES, dtype=name) == 4
        assert count(actual + actual // 5, page_size=7, **SIZES, dtype=name) == 6


def test_dtypes_of_a_byte_and_less_count_their_scales() -> None:
    for dtype in SCALED:
        values = {"float8_e4m3fn": 24 + 17, "int8": 24 + 17, "int4": 12 + 9}[dtype]  # 17 half bytes need 9
        assert bytes_per_token(**SIZES, dtype=dtype) == 3 * 2 * (values + 4 + 4)
    for dtype, bits in BITS.items():
        if dtype not in SCALED:
            assert bytes_per_token(**SIZES, dtype=dtype) == 3 * 2 * (24 + 17) * bits // 8
    assert bytes_per_token(num_layers=1, kv_heads=1, head_dim=8) == 64, "the values are as wide, in float32"


def test_more_pages_than_a_table_can_name() -> None:
    assert pages_that_fit(2**60, page_size=1, num_layers=1, kv_heads=1, head_dim=1, dtype="int8") == 2**31 - 1


@everywhere
def test_names_of_dtypes_that_a_framework_has_or_not(framework: Framework) -> None:
    count = framework.frontend.pages_that_fit
    memory = 16 * bytes_per_token(**SIZES, dtype="int4")
    assert count(memory, page_size=16, **SIZES, dtype="int4") == 1
    fp8 = torch.float8_e4m3fn if framework.name == "torch" else jnp.float8_e4m3fn
    assert count(9**9, page_size=16, **SIZES, dtype=fp8) == count(9**9, page_size=16, **SIZES, dtype="float8_e4m3fn")


@pytest.mark.parametrize("count", [pages_that_fit, *(each.frontend.pages_that_fit for each in BOTH)])
@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"memory": 3934}, SpecError, "memory=3934: expected at least the 3936 bytes of one page, as an int"),
        ({"memory": -1}, SpecError, "memory=-1: expected at least the 3936 bytes of one page"),
        ({"memory": 1e9}, SpecError, "memory=1000000000.0: expected at least the 3936 bytes of one page, as an int"),
        ({"memory": "8 GiB"}, SpecError, "memory='8 GiB': expected"),
        ({"page_size": 0}, SpecError, "page_size=0: expected at least 1, as an int"),
        ({"kv_heads": 2.0}, SpecError, "kv_heads=2.0: expected at least 1, as an int"),
        ({"head_dim": None}, SpecError, "head_dim=None: expected"),
        ({"value_dim": 0}, SpecError, "value_dim=0: expected"),
        ({"num_layers": True}, SpecError, "num_layers=True: expected"),
        ({"dtype": "fp8"}, DTypeError, "dtype='fp8': expected one of float64, float32, "),
        ({"dtype": "complex64"}, DTypeError, "dtype='complex64': expected one of "),
    ],
)
def test_impossible_sizes_are_refused(count: Any, changed: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match="^" + re.escape(says)):
        count(**{"memory": 10**6, "page_size": 4, **SIZES, "dtype": "float32", **changed})


@everywhere
def test_a_cpu_does_not_tell_its_free_memory(framework: Framework) -> None:
    count, device = framework.frontend.pages_that_fit, {"torch": "cpu", "jax": None}[framework.name]
    with pytest.raises(DeviceError, match=r"^device=.*cpu.*: expected a GPU, .*; else pass memory in bytes$|TFRT_CPU"):
        count(page_size=4, **SIZES, device=device)
    with pytest.raises(SpecError, match=r"^device='nowhere': expected a "):
        count(page_size=4, **SIZES, device="nowhere")


@everywhere
def test_a_fraction_of_free_memory(framework: Framework, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted amount of free memory, because a GPU's own changes while it is read."""
    page = 4 * bytes_per_token(**SIZES)
    module = __import__(f"{framework.name}_frontend.paged.cache", fromlist=["_free_memory"])
    monkeypatch.setattr(module, "_free_memory", lambda device: 100 * page)
    count = framework.frontend.pages_that_fit
    assert count(page_size=4, **SIZES) == 90 and count(page_size=4, **SIZES, fraction=1) == 100
    assert count(page_size=4, **SIZES, fraction=np.float64(0.5)) == 50
    for fraction in (0, -0.5, 1.5, True, "half", None, float("nan")):
        with pytest.raises(SpecError, match=r"^fraction=.*: expected a number above 0 and at most 1$"):
            count(page_size=4, **SIZES, fraction=fraction)


@pytest.mark.cuda
@everywhere
def test_free_memory_of_a_gpu(framework: Framework) -> None:
    device = None
    if framework.name == "jax":
        import jax

        device = jax.devices("cuda")[0]
    where = {} if device is None else {"device": device}
    pages = framework.frontend.pages_that_fit(page_size=16, **SIZES, fraction=0.5, **where)
    assert 0 < pages * 16 * bytes_per_token(**SIZES) <= torch.cuda.mem_get_info()[1]
