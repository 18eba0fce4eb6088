"""Calls with tensors ``[batch, heads, len, dim]``: the bits of ``attention``, no more operations than torch's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from torch_frontend import attention, diffusers, finetrainers, recomputed, use_backend
from torch_frontend.recomputed import attention_of_heads

Tensor = torch.Tensor
BATCH, HEADS, GROUPS, QUERIES, KEYS, DIM = 2, 4, 2, 5, 7, 8


def operands(layout: str = "rows", keys: int = KEYS, learns: bool = False) -> list[Tensor]:
    """q, k, v; "rows" are views of ``[batch, len, heads, dim]``, "odd" have channels that are not dense."""
    generator, tensors = torch.Generator().manual_seed(0), []
    for heads, length in ((HEADS, QUERIES), (GROUPS, keys), (GROUPS, keys)):
        tensor = torch.randn(BATCH, length, heads, DIM, generator=generator).transpose(1, 2)
        tensor = {"rows": tensor, "heads": tensor.contiguous(), "odd": tensor.mT.contiguous().mT}[layout]
        tensors.append(tensor.detach().requires_grad_(learns))
    return tensors


def tables() -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    padding = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
    padding[0, ..., 4:] = False
    rows = torch.rand(1, HEADS, QUERIES, KEYS, generator=generator) > 0.4
    rows[:, :, 2] = False  # a row that sees no key
    bias = torch.randn(BATCH, 1, QUERIES, KEYS, generator=generator)
    return {
        "plain": {},
        "causal": {"causal": True},
        "top left": {"causal": True, "alignment": "top_left"},
        "window": {"causal": True, "window": (2, None)},
        "scale": {"scale": 0.7},
        "padding": {"mask": padding},
        "rows": {"mask": rows, "causal": True},
        "bias": {"bias": bias, "mask": padding},
    }


def heads_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return attention(q, k, v, layout="bhsd", **options)


def rows_first(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    out: Tensor = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)
    return out.transpose(1, 2)


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("layout", ["rows", "heads", "odd"])
@pytest.mark.parametrize("name", tables())
def test_the_same_bits_as_attention(name: str, layout: str, learns: bool) -> None:
    options, results = tables()[name], []
    for run in (heads_first, rows_first):
        tensors = operands(layout, learns=learns)
        out = run(*tensors, **options)
        assert out is not None and out.shape == (BATCH, HEADS, QUERIES, DIM) and out.requires_grad == learns
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        results.append([out.detach(), *(torch.autograd.grad(out, tensors, weights) if learns else ())])
    assert all(map(torch.equal, *results))


def test_a_second_derivative_raises_and_changes_before_the_backward_are_found() -> None:
    tensors = operands(learns=True)
    out = heads_first(*tensors)
    (gradient,) = torch.autograd.grad(out.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative|differentiable"):
        gradient.sum().backward()
    out = heads_first(*tensors)
    with torch.no_grad():
        tensors[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_checkpointing_stops_a_recomputation_inside_the_kernel() -> None:
    """Without re-entrance, a hook on saved tensors raises once the last one is recomputed; nothing may catch that."""
    results = []
    for run in (lambda *call: attention_of_heads(*call, trains=True), lambda *call: rows_first(*call).transpose(1, 2)):
        tensors = operands(learns=True)
        out = checkpoint(run, *tensors, use_reentrant=False)
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    assert all(map(torch.equal, *results))


def test_nan_in_a_hidden_key_stays_contained() -> None:
    q, k, v = operands()
    options = tables()["padding"]
    k[0, :, 5], v[0, :, 6] = torch.nan, torch.inf
    assert torch.equal(heads_first(q, k, v, **options), rows_first(q, k, v, **options))
    out = attention_of_heads(q, k, v, trains=False, **options)
    assert out.isfinite().all() and torch.equal(out.transpose(1, 2), rows_first(q, k, v, **options))


@contextmanager
def dual_level() -> Iterator[None]:
    with forward_ad.dual_level():
        yield


OBSERVED: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "forward mode": dual_level,
    "a mode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("name", OBSERVED)
def test_an_observed_call_is_left_to_attention(name: str) -> None:
    tensors = operands()
    with OBSERVED[name]():
        expected, actual = rows_first(*tensors), attention_of_heads(*tensors, trains=False)
        assert torch.equal(heads_first(*tensors), expected)
    assert torch.equal(actual.transpose(1, 2), expected)


def test_requests_and_errors_are_those_of_attention() -> None:
    q, k, v = operands()
    assert torch.equal(heads_first(q, k, v, backend="math"), rows_first(q, k, v, backend="math"))
    with use_backend("math"):
        assert torch.equal(heads_first(q, k, v), rows_first(q, k, v))
        assert torch.equal(attention_of_heads(q, k, v, trains=False).transpose(1, 2), rows_first(q, k, v))
    for wrong in ({"causal": 1}, {"scale": "x"}, {"mask": torch.ones(3, 1, 1, KEYS, dtype=torch.bool)}):
        with pytest.raises(Exception) as ours:
            attention_of_heads(q, k, v, trains=False, **wrong)
        for run in (heads_first, rows_first):
            with pytest.raises(type(ours.value), match=re.escape(str(ours.value))):
                run(q, k, v, **wrong)
    for other in (q.to("meta"), q.to_sparse()):
        with pytest.raises(Exception) as theirs:
            rows_first(other, k, v)
        with pytest.raises(type(theirs.value)):
            heads_first(other, k, v)
    short = torch.ones(QUERIES, KEYS, dtype=torch.bool)
    assert torch.equal(heads_first(torch.nn.Parameter(q), k, v, mask=short), rows_first(q, k, v, mask=short))


def test_a_layer_that_trains_without_gradients_keeps_the_kernel_of_its_second_pass() -> None:
    tensors = operands(learns=True)
    with torch.no_grad():
        first = attention_of_heads(*tensors, trains=True)
    assert torch.equal(attention_of_heads(*tensors, trains=True), first)


def operations(run: Callable[[], Any]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return sum(
        event.count for event in profile.key_averages() if not event.key.startswith(("[", "ProfilerStep", "attn."))
    )


def count(attend: Callable[..., Tensor], *tensors: Tensor, **options: Any) -> int:
    """The operations of a call, and of its backward if the tensors require gradients."""

    def run() -> None:
        out = attend(*tensors, **options)
        if out.requires_grad:
            torch.autograd.grad(out, tensors, torch.ones(BATCH, HEADS, QUERIES, DIM))

    run()
    return operations(run)


@pytest.mark.parametrize("learns", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["full", "causal"])
def test_the_drop_ins_run_no_more_operations_than_torchs_own_attention(options: dict[str, Any], learns: bool) -> None:
    tensors, call = operands(keys=QUERIES, learns=learns), {**options, "enable_gqa": True}
    expected = count(functional.scaled_dot_product_attention, *tensors, **call)
    for ours in (finetrainers.attention_dispatch, diffusers._attention):
        assert count(ours, *tensors, **call) <= expected


@pytest.mark.parametrize("layout", ["rows", "heads"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_a_single_querys_heads_become_queries_of_their_kv_head(
    masked: bool, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients of decoding are those of grouped heads; the kernel sees kv heads alone."""
    length, shapes = 150, []
    keep = torch.rand(BATCH, 1, 1, length, generator=torch.Generator().manual_seed(3)) > 0.3
    keep[1] = False  # a row that sees no key
    options = {"mask": keep} if masked else {}
    spied = lambda q, *others, **named: shapes.append(q.shape) or attention(q, *others, **named)  # noqa: E731
    monkeypatch.setattr(recomputed, "attention", spied)
    results = []
    for run in (lambda *call: attention_of_heads(*call, trains=True, **options).transpose(1, 2), rows_first):
        q, k, v = operands(layout, length)
        tensors = [tensor.detach().requires_grad_() for tensor in (q[:, :, :1], k, v)]
        out = run(*tensors) if run is not rows_first else rows_first(*tensors, **options)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        results.append([out, *torch.autograd.grad((out * weights).sum(), tensors)])
    assert shapes == [(BATCH, GROUPS, HEADS // GROUPS, DIM)]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_a_query_whose_heads_differ_in_visible_keys_is_not_packed() -> None:
    q, k, v = operands(keys=150)
    q = q[:, :, :1]
    for options in (
        {"mask": torch.rand(1, HEADS, 1, 150) > 0.5},
        {"bias": torch.randn(1, 1, 1, 150)},
        {"causal": True, "window": (3, None)},
        {"causal": True, "alignment": "top_left"},
    ):
        out = attention_of_heads(q, k, v, trains=False, **options)  # type: ignore[arg-type]
        assert torch.equal(out.transpose(1, 2), rows_first(q, k, v, **options))
