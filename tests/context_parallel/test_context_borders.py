"""Tests the gradients of a border, which are added at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from attn_core.context_parallel.on_torch.borders import add_border

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def added_one_by_one(tensors: list[Any], border: Any, values: list[Any]) -> None:
    for tensor, of_tensor in zip(tensors, values, strict=True):
        pieces = of_tensor.split([stop - start for start, stop in border], 1)
        for (start, stop), piece in zip(border, pieces, strict=True):
            tensor[:, start:stop].add_(piece[:, : tensor[:, start:stop].shape[1]])


@pytest.mark.parametrize(("sums", "values"), [*itertools.product(DTYPES, DTYPES)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("places", [40, 33, 20])  # the last range is whole, cut, or missing
def test_a_border_of_several_ranges_is_added_by_one_call_with_the_same_bits(
    sums: Any, values: Any, batch: int, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    border, calls = ((0, 0), (3, 9), (30, 40)), []  # type: ignore[var-annotated]
    random = torch.Generator().manual_seed(3)
    before = [torch.randn(batch, places, 2, dim, generator=random).to(sums) for dim in (8, 5)]
    given = [torch.randn(batch, 16, 2, dim, generator=random).to(values) for dim in (8, 5)]
    right, actual = ([each.clone() for each in before] for _ in range(2))
    added_one_by_one(right, border, given)
    at_once = torch._foreach_add_
    monkeypatch.setattr(torch, "_foreach_add_", lambda *lists: (calls.append(len(lists[0])), at_once(*lists)))
    add_border(actual, border, given)
    assert all(map(torch.equal, actual, right)) and not torch.equal(actual[0], before[0])
    assert calls == ([] if places == 20 else [4])  # one call does not pay off for two ranges


def test_a_border_behind_a_short_block_adds_nothing() -> None:
    block = torch.ones(1, 4, 2, 8)
    add_border([block, block], ((4, 6),), [torch.ones(1, 2, 2, 8)] * 2)
    assert (block == 1).all()
