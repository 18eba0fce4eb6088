"""Masks that keep their additive form: when it is used again, and when it must be computed anew."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from attn_core.backends.shared import aten_masks
from attn_core.call.spec import AttentionSpec
from torch_frontend import attention


@pytest.fixture
def mask() -> torch.Tensor:
    table = torch.rand(2, 1, 1, 11, generator=torch.Generator().manual_seed(0)) < 0.5
    aten_masks.keep_additive(table)
    return table


def additive(mask: Any, **options: Any) -> torch.Tensor:
    return aten_masks.additive(mask, None, torch.bfloat16, mask.shape[3], **options)


def test_a_form_is_computed_once_until_the_mask_changes(mask: torch.Tensor) -> None:
    first = additive(mask)
    assert additive(mask) is first
    assert additive(mask, aligned=False) is not first  # another form
    mask[:, :, :, 0] = ~mask[:, :, :, 0]
    changed = additive(mask)
    assert changed is not first and torch.equal(changed == 0, mask)


def test_the_function_of_a_spec_uses_the_kept_form(mask: torch.Tensor) -> None:
    sizes = {"batch": 2, "q_len": 5, "kv_len": 11, "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "value_dim": 8}
    prepared = aten_masks.additive_of(
        AttentionSpec(**sizes, dtype="bfloat16", mask_shape=(2, 1, 1, 11)), "bfloat16", aligned=False
    )
    assert prepared(mask, None) is prepared(mask, None) is additive(mask, aligned=False)
    assert prepared(mask.clone(), None) is not prepared(mask, None)


@pytest.mark.cuda
def test_each_stream_has_its_own_form() -> None:
    mask = torch.rand(2, 1, 1, 11, device="cuda") < 0.5
    aten_masks.keep_additive(mask)
    first = additive(mask)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert additive(mask) is not first
    assert additive(mask) is first


def test_only_the_mask_itself_keeps_its_form(mask: torch.Tensor) -> None:
    first = additive(mask)
    for other in (mask.clone(), mask[:1], copy.deepcopy(mask), mask.logical_not()):
        assert additive(other) is not first and torch.equal(additive(other) == 0, other)
    plain = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    assert additive(plain) is not additive(plain)


def test_large_forms_are_not_kept(mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten_masks, "KEPT_ELEMENTS", mask.numel() - 1)
    assert additive(mask) is not additive(mask)


def test_inference_mode_and_training_have_separate_forms(mask: torch.Tensor) -> None:
    with torch.inference_mode():
        inside = additive(mask)
        assert inside.is_inference() and additive(mask) is inside
        aten_masks.keep_additive(unmarked := torch.ones(1, 1, 1, 4, dtype=torch.bool))
        assert additive(unmarked) is not additive(unmarked)
    assert not additive(mask).is_inference()


def test_observed_calls_use_no_kept_form(mask: torch.Tensor) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    first = additive(mask)
    with FlopCounterMode(display=False):
        assert additive(mask) is not first
    torch.func.vmap(lambda x: x * (additive(mask) is first))(torch.ones(2))
    assert torch.func.vmap(lambda x: x * (additive(mask) is not first))(torch.ones(2)).all()


@pytest.mark.parametrize("queries", [1, 11])
def test_a_kept_form_gives_the_same_results_and_gradients(mask: torch.Tensor, queries: int) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = (2, queries, 4, 8), (2, 11, 4, 8), (2, 11, 4, 8)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    results = []
    for table in (mask, mask, mask.clone()):
        out = attention(q, k, v, mask=table, causal=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for one, two in zip(results[1], results[2], strict=True):
        assert torch.equal(one, two)


def test_a_compiled_call_keeps_no_form(mask: torch.Tensor) -> None:
    """Memory that is allocated while a CUDA graph warms up belongs to the graph, so no mask may hold it."""
    q = torch.randn(2, 5, 4, 8)
    k = torch.randn(2, 11, 4, 8)
    forms = getattr(mask, aten_masks.KEPT_MARK)[1]

    def call(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, mask=mask)

    compiled = torch.compile(call, backend="eager", fullgraph=True)(q, k, mask)
    assert not forms
    torch.testing.assert_close(call(q, k, mask), compiled)
    assert forms


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["sdpa_cudnn", "sdpa_efficient"])
def test_a_cuda_graph_of_a_compiled_call_takes_a_mask_that_keeps_forms(backend: str) -> None:
    q, k = (torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (1, 16))

    def call(mask: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, mask=mask, backend=backend) * 2

    compiled = torch.compile(call, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(5):
            mask = torch.rand(2, 1, 1, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)) < 0.5
            aten_masks.keep_additive(mask)
            for _ in range(2):
                torch.testing.assert_close(compiled(mask).clone(), call(mask))
