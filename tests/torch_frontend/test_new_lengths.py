"""Tests the plans of calls whose sizes alone are new: they take checks from earlier calls, and must not differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from attn_core.call.options import check_options
from attn_core.call.tensors import Inputs
from attn_core.errors import SpecError
from torch_frontend import attention
from torch_frontend.dispatch import eager_calls, plan

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 3)},
    "window that hides a key of some lengths": {"causal": True, "window": (49, 0)},
    "mask": {"mask": (True, False, True, False)},
    "full mask": {"mask": (True, True, True, True), "causal": True},
    "bias": {"bias": (False, True, True, True)},
    "requested": {"backend": ("flash2", "sdpa_flash", "math")},
}
SIZES = ((2, 7, 9), (3, 8, 10), (1, 30, 31), (2, 9, 9), (4, 1, 50), (2, 1, 51), (2, 12, 12), (2, 1, 1))


def call_of(
    sizes: tuple[int, int, int], options: dict[str, Any], needs_grad: bool
) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns q, k, v of (batch, q_len, kv_len) and the options, with tables in place of the axes that they have."""
    batch, q_len, kv_len = sizes
    q = torch.randn(batch, q_len, 4, 8, requires_grad=needs_grad)
    k, v = torch.randn(batch, kv_len, 2, 8), torch.randn(batch, kv_len, 2, 8)
    given = dict(options)
    for name in ("mask", "bias"):
        if name in options:
            shape = [n if has else 1 for n, has in zip((batch, 4, q_len, kv_len), options[name], strict=True)]
            given[name] = torch.randn(shape) if name == "bias" else torch.rand(shape) > 0.2
    return [q, k, v], given


@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_plan_of_new_lengths_is_the_plan_of_a_first_call(options: dict[str, Any], needs_grad: bool) -> None:
    for sizes in SIZES:
        tensors, given = call_of(sizes, options, needs_grad)
        tables = [given.pop(name, None) for name in ("mask", "bias")]
        entries = [None if t is None else (t.shape, t.dtype, t.device) for t in (*tensors, *tables)]
        requested = given.pop("backend", None)
        defaults = dict(causal=False, alignment="bottom_right", window=None, softcap=None, scale=None)
        defaults |= {"dropout": 0.0, "deterministic": False, "return_lse": False, "invariant": None}
        named = {**defaults, **given}
        checked = check_options(plan.Options(**named))
        first = plan.plan(Inputs(*entries), checked, needs_grad, False, requested)
        actual = eager_calls.plan_by_family(Inputs(*entries), checked, needs_grad, False, requested)
        assert (actual.spec, hash(actual.spec), actual.backend) == (first.spec, hash(first.spec), first.backend)
        assert (actual.shortcut is None, actual.one_row) == (first.shortcut is None, first.one_row)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_calls_of_new_lengths_compute_what_math_computes(options: dict[str, Any]) -> None:
    for sizes in SIZES:
        tensors, given = call_of(sizes, options, needs_grad=True)
        expected = attention(*tensors, **{**given, "backend": "math"})
        actual = attention(*tensors, **given)
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), tensors[:1]) for out in (actual, expected)))


WRONG = {
    "batch of k": ((2, 5, 2, 8), (3, 6, 1, 8), (2, 6, 1, 8)),
    "length of v": ((2, 5, 2, 8), (2, 6, 1, 8), (2, 7, 1, 8)),
    "head_dim of k": ((2, 5, 2, 8), (2, 6, 1, 16), (2, 6, 1, 8)),
    "heads of v": ((2, 5, 2, 8), (2, 6, 1, 8), (2, 6, 2, 8)),
    "three axes": ((2, 5, 2, 8), (2, 6, 1, 8), (6, 1, 8)),
}


@pytest.mark.parametrize("shapes", WRONG.values(), ids=WRONG)
def test_wrong_shapes_raise_after_calls_that_differ_in_sizes_alone(shapes: tuple[tuple[int, ...], ...]) -> None:
    for length in (4, 5, 6):
        k = torch.randn(2, length, 1, 8)
        attention(torch.randn(2, 5, 2, 8), k, k)
    with pytest.raises(SpecError):
        attention(*(torch.randn(shape) for shape in shapes))


def test_wrong_masks_raise_after_calls_that_differ_in_sizes_alone() -> None:
    q = torch.randn(2, 5, 2, 8)
    for length in (4, 6):
        k = torch.randn(2, length, 2, 8)
        attention(q, k, k, mask=torch.ones(2, 1, 5, length, dtype=torch.bool))
    for shape in ((2, 1, 5, 5), (2, 1, 4, 6), (3, 1, 5, 6), (2, 3, 5, 6)):
        with pytest.raises(SpecError, match="mask"):
            attention(q, k, k, mask=torch.ones(shape, dtype=torch.bool))


def test_options_that_are_equal_but_of_another_type_still_raise() -> None:
    for length in (4, 5):
        x = torch.randn(1, length, 2, 8)
        attention(x, x, x, causal=True)
    x = torch.randn(1, 6, 2, 8)
    with pytest.raises(SpecError, match="causal=1"):
        attention(x, x, x, causal=1)  # type: ignore[arg-type]
