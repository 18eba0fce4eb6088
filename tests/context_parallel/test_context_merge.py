"""Tests that the merge of two results keeps the precision of the one with nearly all weight, in both frameworks."""

from __future__ import annotations

import numpy as np
import pytest

Results = tuple[np.ndarray, np.ndarray]


def on_torch(one: Results, other: Results, device: str) -> np.ndarray:
    import torch

    from attn_core.context_parallel.on_torch.tiles import merge

    out, lse, *rest = (torch.from_numpy(array.copy()).to(device) for array in (*one, *other))
    merge(out, lse, *rest)
    return out.cpu().numpy()


def on_jax(one: Results, other: Results, device: str) -> np.ndarray:
    if device != "cpu":
        pytest.skip("XLA computes the same operations on every device")
    from jax_frontend.context_parallel.tiles import merge

    return np.asarray(merge(*one, *other)[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("merge", [on_torch, on_jax])
@pytest.mark.parametrize("first", [True, False])
def test_a_large_output_of_little_weight_leaves_no_error(merge, first: bool, device: str) -> None:
    """Its weight is 1 / 1000, and it is 1000 times as large. If it came first, it left 2**-24 times itself."""
    random = np.random.default_rng(0)
    large, small = (size * random.standard_normal((1, 50, 2, 16)).astype(np.float32) for size in (1.0, 1e-3))
    high, low = (np.full((1, 2, 50), lse, np.float32) for lse in (np.log(999), 0.0))
    results = [(large, low), (small, high)] if first else [(small, high), (large, low)]
    weights = [np.exp(lse.astype(np.float64)).swapaxes(1, 2)[..., None] for _, lse in results]
    terms = [weight / sum(weights) * out.astype(np.float64) for weight, (out, _) in zip(weights, results, strict=True)]
    error = abs(merge(*results, device) - sum(terms))
    assert (error <= 2.0**-21 * sum(map(abs, terms))).all()
