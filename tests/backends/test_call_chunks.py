"""Tests that plain attention gives the same results in chunks of a few heads, which large calls on a CPU have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from attn_core.backends.shared.plain import attention as plain_attention
from attn_core.backends.shared.plain import blocks
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from torch_frontend import SeqInfo, attention

BATCH, ROWS, KEYS, HEADS, KV_HEADS = 2, 150, 159, 6, 3
PER_HEAD = HEADS // KV_HEADS * KEYS * plain_attention.QUERY_BLOCK
LIMITS = {"one head, fewer rows": 1, "one head": PER_HEAD, "two heads": 2 * PER_HEAD, "one row": 3 * PER_HEAD}
"""Values of CACHED_SCORES by the size of a chunk."""


def tables(name: str) -> dict[str, Any]:
    torch.manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (7, 3)},
        "softcap": {"softcap": 2.0, "causal": True},
        "bias": {"bias": normal(1, HEADS, ROWS, KEYS).requires_grad_()},
        "bias of keys": {"bias": normal(BATCH, 1, 1, KEYS).requires_grad_()},
        "bias of another dtype": {"bias": normal(1, HEADS, ROWS, KEYS).float()},
        "mask and sinks": {"mask": torch.rand(BATCH, HEADS, ROWS, 1) > 0.4, "sinks": normal(HEADS).requires_grad_()},
        "few keys are seen": {"mask": torch.rand(1, 1, ROWS, KEYS) > 0.99, "sinks": normal(HEADS)},
        "slopes of rows": {"alibi_slopes": torch.rand(BATCH, HEADS, dtype=torch.float64), "causal": True},
    }[name]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def set_to(scores: int) -> None:
        monkeypatch.setattr(plain_attention, "CACHED_SCORES", scores)
        plain_attention.block_sizes.cache_clear()

    yield set_to
    plain_attention.block_sizes.cache_clear()


def results(options: dict[str, Any]) -> list[torch.Tensor]:
    """The output, the log-sum-exp and all gradients."""
    torch.manual_seed(1)
    sizes = ((ROWS, HEADS, 8), (KEYS, KV_HEADS, 8), (KEYS, KV_HEADS, 5))
    leaves = [torch.randn(BATCH, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    out, lse = attention(*leaves, **options, return_lse=True, backend="math")
    leaves += [table for table in options.values() if isinstance(table, torch.Tensor) and table.requires_grad]
    upstream = [out.detach() + 0.3, lse.detach().nan_to_num(neginf=0.0)]
    return [out, lse, *torch.autograd.grad([out, lse], leaves, upstream)]


@pytest.mark.sampled
@pytest.mark.parametrize("scores", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize(
    "name",
    [
        *("plain", "causal", "window", "softcap", "bias", "bias of keys", "bias of another dtype"),
        *("mask and sinks", "few keys are seen", "slopes of rows"),
    ],
)
def test_chunks_change_no_result(name: str, scores: int, limit: Any) -> None:
    options = tables(name)
    limit(2**40)
    expected = results(options)
    limit(scores)
    for actual, wanted in zip(results(options), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)


def test_a_large_call_has_chunks(limit: Any) -> None:
    from attn_core import AttentionSpec

    sizes = {"q_len": ROWS, "kv_len": KEYS, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": 8, "value_dim": 8}
    spec = AttentionSpec(batch=BATCH, **sizes, dtype="float32")
    limit(2 * PER_HEAD)
    height, chunks, _ = plain_attention.block_sizes(spec, True)
    assert height == plain_attention.QUERY_BLOCK
    assert [(chunk.batch.start, chunk.heads) for chunk in chunks] == [
        *((0, slice(0, 4)), (0, slice(4, 6)), (1, slice(0, 4)), (1, slice(4, 6)))
    ]
    assert len(plain_attention.block_sizes(spec, False)[1]) == 1
    limit(1)
    assert plain_attention.block_sizes(spec, True)[0] == plain_attention.FEWEST_ROWS


LARGE = {
    "window": {"window": (40, 9)},
    "softcap": {"softcap": 3.0, "causal": True},
    "large softcap": {"softcap": 300.0, "causal": True},
    "documents": {"causal": True, "seq_info": SeqInfo.from_lengths([3, 200, 1, 97], [3, 150, 4, 144])},
    "empty rows": {"window": (0, 3), "softcap": 2.0},
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("broken", [None, "k", "v"])
def test_a_call_with_bounded_scores_gives_the_results_of_one_that_looks_at_each(
    name: str, broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    tensors = [torch.randn(1, rows, heads, 8) for rows, heads in ((301, 4), (301, 2), (301, 2))]
    if broken is not None:
        tensors["qkv".index(broken)][0, 250, 1, 2] = float("nan")
    found = []
    for rows in (0, 10**9):
        monkeypatch.setattr(blocks, "FEW_ROWS", rows)
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        out, lse = attention(*leaves, **LARGE[name], return_lse=True, backend="math")
        found.append([out, lse, *torch.autograd.grad(out.square().sum(), leaves)])
    for fast, careful in zip(*found, strict=True):
        torch.testing.assert_close(fast, careful, equal_nan=True)
    assert broken is None or found[0][0][0, :40].isfinite().all()


@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 64.0, 65.0, 1e4])
def test_the_softcap_is_as_exact_as_float32(cap: float) -> None:
    torch.manual_seed(4)
    tensors = [torch.randn(1, 300, 2, 16) * size for size in (3.0, 3.0, 1.0)]
    _, lse = attention(*tensors, softcap=cap, causal=True, return_lse=True, backend="math")
    exact = attention(*(t.double() for t in tensors), softcap=cap, causal=True, return_lse=True, backend="math")[1]
    assert (lse - exact).abs().max() <= 4e-7 * min(cap, 64.0) + 4e-6


def test_only_finite_values_are_bounded() -> None:
    def bounded(value: float, **options: Any) -> bool:
        sizes = {"batch": 2, "q_len": 600, "kv_len": 600, "num_heads": 2, "num_kv_heads": 2}
        spec = AttentionSpec(**sizes, head_dim=8, value_dim=8, dtype="float32", **options)
        q = torch.ones(2, 600, 2, 8)
        k = q.clone()
        k[1, 5, 1, 3] = value
        return blocks.is_bounded(spec, Inputs(q, k, q))

    assert bounded(1.0)
    assert not any(bounded(value) for value in (float("nan"), float("inf"), -float("inf"), 1e30))
    assert not bounded(1.0, mask_shape=(1, 1, 600, 600))
    assert not bounded(1.0, softcap=1e-38)


@pytest.mark.parametrize("backward", [False, True])
def test_the_blocks_of_a_call_share_their_memory(backward: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, int]] = []

    class Counted(blocks.ScoreMemory):
        def part(self, name: str, *shape: int) -> torch.Tensor:
            part: torch.Tensor = super().part(name, *shape)
            used.append((name, part.untyped_storage().data_ptr()))
            return part

    monkeypatch.setattr(plain_attention, "ScoreMemory", Counted)
    q, k, v = (torch.randn(1, 700, 2, 8, requires_grad=backward) for _ in range(3))
    out = attention(q, k, v, causal=True, backend="math")
    if backward:
        used.clear()
        out.sum().backward()
    assert len(used) >= 6
    assert len(set(used)) == (2 if backward else 1)  # scores, and in the backward the weights' gradient


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_narrow_window_has_lower_blocks_and_reads_the_keys_in_place(batch: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    tensors = [torch.randn(batch, 300, heads, 8).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    row, column = torch.arange(300)[:, None], torch.arange(300)
    band = (column <= row) & (column >= row - 20)
    found = []
    for options in ({"causal": True, "window": (20, None)}, {"mask": band.expand(1, 1, 300, 300)}):
        out = attention(*tensors, **options, backend="math")
        found.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    for windowed, masked in zip(*found, strict=True):
        torch.testing.assert_close(windowed, masked)
