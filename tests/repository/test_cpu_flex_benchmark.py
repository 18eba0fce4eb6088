"""Tests that the benchmark beside compiled FlexAttention gives both sides the same call."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from benchmarks import cpu_flex
from torch_frontend import attention

TOKENS = 67


@pytest.mark.parametrize("name", cpu_flex.cases(TOKENS))
def test_both_sides_see_the_same_keys(name: str) -> None:
    options, mask, _ = cpu_flex.cases(TOKENS)[name]
    row, column = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)
    q, v = torch.zeros(1, TOKENS, 1, 8), torch.eye(TOKENS).view(1, TOKENS, 1, TOKENS)
    out = attention(q, torch.zeros_like(q), v, causal=True, backend="math", **options)
    assert torch.equal(out[0, :, 0] > 0, mask(0, 0, row, column))


def test_documents_fill_the_row() -> None:
    for tokens in cpu_flex.TOKENS:
        lengths = cpu_flex.documents(tokens)
        assert sum(lengths) == tokens and min(lengths) > 0
