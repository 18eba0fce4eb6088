"""Tests decoding on torch's CPU flash kernel: heads of a group share the keys, and hidden NaN shows in the results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from attn_core import AttentionSpec
from attn_core.backends.sdpa_flash import containment, cpu_kernel
from torch_frontend import attention, paged_attention

BATCH, KEYS, DIM = 3, 37, 16
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
HEADS = [(6, 2), (4, 4), (5, 1)]


def options(name: str, heads: int) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "plain": {},
        "causal": {"causal": True},
        "top left": {"causal": True, "alignment": "top_left"},
        "mask": {"mask": torch.rand(BATCH, 1, 1, KEYS) > 0.3},
        "mask of heads": {"mask": torch.rand(1, heads, 1, KEYS) > 0.3},
        "nothing is seen": {"mask": torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool)},
        "window": {"window": (9, 0)},
        "slopes of heads": {"alibi_slopes": torch.rand(heads)},
        "slopes of rows": {"alibi_slopes": torch.rand(BATCH, heads)},
        "sinks": {"sinks": torch.randn(heads)},
    }[name]


def operands(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = ((1, heads), (KEYS, kv_heads), (KEYS, kv_heads))
    return [torch.randn(BATCH, length, number, DIM, dtype=dtype) for length, number in sizes]


NAMES = [
    *("plain", "causal", "top left", "mask", "mask of heads", "nothing is seen"),
    *("window", "slopes of heads", "slopes of rows", "sinks"),
]


@pytest.fixture(params=[False, True], ids=["no tiles", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Runs a test for both kinds of processor. The cached choice of this machine is emptied before and after."""
    monkeypatch.setattr(cpu_kernel, "has_tiles", lambda: request.param)
    cpu_kernel.forward_op.cache_clear()
    yield request.param
    cpu_kernel.forward_op.cache_clear()


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", NAMES)
def test_decoding_equals_plain_attention(name: str, heads: int, kv_heads: int, dtype: torch.dtype, tiles: bool) -> None:
    tensors, keywords = operands(heads, kv_heads, dtype), options(name, heads)
    expected, expected_lse = attention(*tensors, **keywords, return_lse=True, backend="math")
    out, lse = attention(*tensors, **keywords, return_lse=True, backend="sdpa_flash")
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCES[dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=max(TOLERANCES[dtype], 1e-5))
    assert torch.equal(attention(*tensors, **keywords, backend="sdpa_flash"), out)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dtype", "queries", "with_tiles"),
    [
        (6, 2, torch.float32, [2, 3], [2, 3]),
        (6, 2, torch.bfloat16, [2, 3], [6, 1]),
        (8, 2, torch.bfloat16, [2, 4], [2, 4]),
        (4, 4, torch.bfloat16, [4, 2], [4, 1]),
    ],
    ids=str,
)
def test_the_kernel_gets_the_heads_of_a_group_as_queries(
    heads: int, kv_heads: int, dtype: torch.dtype, queries: list[int], with_tiles: list[int], tiles: bool
) -> None:
    shapes = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "flash_attention" in func.name():
                shapes.append(list(args[0].shape))
            return func(*args, **(kwargs or {}))

    spec = AttentionSpec(
        **{"batch": BATCH, "q_len": 1, "kv_len": KEYS, "num_heads": heads, "num_kv_heads": kv_heads},
        **{"head_dim": DIM, "value_dim": DIM, "dtype": str(dtype).removeprefix("torch.")},
    )
    tensors = [tensor.transpose(1, 2) for tensor in operands(heads, kv_heads, dtype)]
    with Recorded():
        out, lse = cpu_kernel.forward_op(spec)(*tensors)
    assert shapes == [[BATCH, *(with_tiles if tiles else queries), DIM]]
    assert (out.shape, lse.shape) == ((BATCH, heads, 1, DIM), (BATCH, heads, 1))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("at", ["k", "v"])
@pytest.mark.parametrize("channels", [slice(None), slice(3, 4)], ids=["all channels", "one channel"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_results_without_nan_are_those_without_the_hidden_value(
    dtype: torch.dtype, channels: slice, at: str, value: float
) -> None:
    """Whatever the kernel does with a hidden value, its results are either right or noticed."""
    kernel = cpu_kernel.kernels()[0]
    cases = ((5, 3, 5), (40, 0, 20), (600, 7, 8), (1100, 500, 1100))
    for queries, (keys, first, last) in product((1, 3), cases):
        torch.manual_seed(keys)
        q, k, v = (torch.randn(2, 2, length, DIM, dtype=dtype) for length in (queries, keys, keys))
        mask = torch.zeros(1, 1, 1, keys, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        mask[..., first:last] = -torch.inf
        clean = kernel(q, k, v, 0.0, False, attn_mask=mask)
        assert containment.are_results_finite(*clean)
        {"k": k, "v": v}[at][0, :, first:last, channels] = value
        results = kernel(q, k, v, 0.0, False, attn_mask=mask)
        if containment.are_results_finite(*results):
            assert torch.equal(results[0], clean[0]) and torch.equal(results[1], clean[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("name", ["mask", "window", "sinks"])
def test_a_hidden_value_affects_no_result(name: str, at: int, value: float) -> None:
    tensors, keywords = operands(6, 2, torch.float32), options(name, 6)
    keywords = keywords | ({"mask": torch.arange(KEYS).view(1, 1, 1, KEYS) > 4} if name != "window" else {})
    clean = attention(*tensors, **keywords, backend="sdpa_flash")
    tensors[at][1, 2] = value  # hidden by the mask and by the window
    broken = attention(*tensors, **keywords, backend="sdpa_flash")
    assert torch.equal(broken[0], clean[0])
    torch.testing.assert_close(broken, clean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengths", [[40, 40], [40, 23]], ids=str)
@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decoding_from_pages_equals_plain_attention(
    heads: int, kv_heads: int, dtype: torch.dtype, value: float, lengths: list[int]
) -> None:
    torch.manual_seed(3)
    pools = [torch.randn(12, 8, kv_heads, 64, dtype=dtype) for _ in range(2)]
    q, table = torch.randn(2, heads, 64, dtype=dtype), torch.randperm(12)[:10].view(2, 5).int()
    for pool in pools:  # slots behind the end of the shorter sequence
        pool[table[1, 2].item(), 7] = value
        pool[table[1, 3:].long()] = value if lengths[1] < 40 else 0.0
    if lengths[1] == 40:
        pools[0][table[1, 2].item(), 7] = pools[1][table[1, 2].item(), 7] = 0.0
    keywords = {"block_table": table, "seq_lens": torch.tensor(lengths, dtype=torch.int32), "return_lse": True}
    out, lse = paged_attention(q, *pools, **keywords, backend="sdpa_flash")
    expected, expected_lse = paged_attention(q, *pools, **keywords, backend="math")
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCES[dtype])
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=max(TOLERANCES[dtype], 1e-5))
