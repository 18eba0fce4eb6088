"""Tests the short way of calls with key ranges alone. It is for GPUs; here it runs on a CPU, beside the general way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from attn_core import ShapeError, SpecError, masks
from torch_frontend import attention
from torch_frontend.dispatch import eager_calls, general_calls

RANGES = np.concatenate([masks.shared_prefix(5, [3, 4]), masks.documents([7, 5])])


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that calls took since, "short" for a call that the short way ran."""
    taken: list[str] = []
    short, general = eager_calls._attend_with_ranges, general_calls.run

    def noted(*arguments: Any) -> Any:
        results = short(*arguments)
        taken.append("short" if results is not None else "none")
        return results

    def noted_general(*arguments: Any) -> Any:
        taken.append("general")
        return general(*arguments)

    monkeypatch.setattr(eager_calls, "_is_on_gpu", lambda q: True)
    monkeypatch.setattr(eager_calls, "_attend_with_ranges", noted)
    monkeypatch.setattr(general_calls, "run", noted_general)
    return taken


def drawn(trains: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 12, 4, 8), (2, 12, 2, 8), (2, 12, 2, 6)
    return [torch.randn(shape, generator=generator).requires_grad_(trains) for shape in shapes]


def results_of(key_ranges: Any, trains: bool, **options: Any) -> list[Any]:
    leaves = drawn(trains)
    found = attention(*leaves, key_ranges=key_ranges, **options)
    outputs = list(found) if options.get("return_lse") else [found]
    if not trains:
        return outputs
    loss = sum((output * torch.arange(output.numel()).view(output.shape)).sum() for output in outputs)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("options", [{}, {"return_lse": True}, {"causal": True, "softcap": 3.0}, {"backend": "math"}])
@pytest.mark.parametrize("of", [np.array, torch.from_numpy])
def test_same_results(of: Callable[[Any], Any], options: dict[str, Any], trains: bool, ways: list[str]) -> None:
    actual = results_of(of(RANGES), trains, **options)
    assert ways == ["short"]
    with torch.autograd.forward_ad.dual_level():  # an observed call takes the general way
        expected = results_of(of(RANGES), trains, **options)
    assert ways == ["short", "none", "general"]
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape and torch.equal(one, other)


def test_read_only_ranges(ways: list[str]) -> None:
    fixed = RANGES.copy()
    fixed.flags.writeable = False
    assert torch.equal(results_of(fixed, False)[0], results_of(RANGES, False)[0]) and ways == ["short"] * 2


@pytest.mark.parametrize(
    ("key_ranges", "error"),
    [
        (RANGES[:, :, :5], ShapeError),
        (np.where(RANGES == 12, 13, RANGES), SpecError),
        (RANGES[..., ::-1].copy(), SpecError),
        (np.zeros((1, 1, 5, 1, 1), np.int32), ShapeError),  # an odd number of numbers
    ],
)
def test_errors_are_those_of_the_general_way(key_ranges: np.ndarray, error: type[Exception], ways: list[str]) -> None:
    with pytest.raises(error, match="key_ranges") as ours:
        attention(*drawn(False), key_ranges=key_ranges)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(error) as expected:
        attention(*drawn(False), key_ranges=key_ranges)
    assert str(ours.value) == str(expected.value) and ways[-2:] == ["none", "general"]


@pytest.mark.parametrize("key_ranges", [RANGES.astype(np.int64), "ranges", torch.from_numpy(RANGES).to_sparse()])
def test_unknown_kinds_are_left_to_the_general_way(key_ranges: Any, ways: list[str]) -> None:
    with pytest.raises((TypeError, ValueError)):
        attention(*drawn(False), key_ranges=key_ranges)
    assert ways == ["none", "general"]
