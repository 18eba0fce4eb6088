"""Tests re-entrant checkpointing: its first pass, which runs without gradients, uses the kernel of its second pass.

On a CPU, flex is the kernel without a backward.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from frameworks import spied
from torch.utils.checkpoint import checkpoint
from unsloth_rows import attend_as_unsloth

import torch_frontend
from attn_core import NoBackendError, SeqInfo
from torch_frontend import attention, use_backend
from torch_frontend.huggingface import attention as huggingface_attention
from torch_frontend.module import Attention
from torch_frontend.recomputed import attention_of_layer

Tensor = torch.Tensor
TOKENS, HEADS, HEAD_DIM = 6, 2, 4


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(1, 2)  # [batch, heads, len, head_dim]


def rows(x: Tensor) -> list[Tensor]:
    return [x.unflatten(-1, (HEADS, HEAD_DIM))] * 3


def run_attention(x: Tensor, trains: bool) -> Tensor:
    return attend_as_unsloth(torch_frontend, *rows(x), requires_grad=trains)


def in_training_mode(x: Tensor, trains: bool) -> Tensor:
    """As in Unsloth, whose hidden states need no gradient in a checkpoint's first pass."""
    return attend_as_unsloth(torch_frontend, *rows(x), requires_grad=x.requires_grad, training=trains)


def packed(x: Tensor, trains: bool) -> Tensor:
    info = SeqInfo.from_lengths([x.shape[0] * x.shape[1] - 1, 1])
    return attend_as_unsloth(torch_frontend, *rows(x), requires_grad=trains, seq_info=info)


def shared_prefix(x: Tensor, trains: bool) -> Tensor:
    suffix = torch.tensor([-1, -1, 0, 0, 1, 1])
    info = SimpleNamespace(group_of_kv=suffix * 0, is_prefix=suffix < 0, suffix_of_kv=suffix)
    return attend_as_unsloth(torch_frontend, *rows(x[:1]), requires_grad=trains, prefix_seg_info=info)


def softcapping(x: Tensor, trains: bool) -> Tensor:
    capped = SimpleNamespace(query_pre_attn_scalar=HEAD_DIM, attn_logit_softcapping=30.0)
    layer = SimpleNamespace(training=trains, config=capped)
    mask = torch_frontend.unsloth.create_flex_attention_causal_mask(TOKENS)
    return torch_frontend.unsloth.slow_attention_softcapping(
        heads(x), heads(x), heads(x), mask, layer, len(x), x.shape[1]
    )


def transformers(x: Tensor, trains: bool) -> Tensor:
    layer = SimpleNamespace(training=trains, is_causal=True)
    return huggingface_attention.attend(layer, heads(x), heads(x), heads(x), None)[0]


MODULE = Attention(HEADS, HEADS * HEAD_DIM, causal=True)


def module(x: Tensor, trains: bool) -> Tensor:
    return MODULE.train(trains)(x)


DOORS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    each.__name__: each
    for each in (run_attention, in_training_mode, packed, shared_prefix, softcapping, transformers, module)
}


def gradient(function: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.randn(2, TOKENS, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(1)
    function(x * 1).square().sum().backward()
    return x.grad


@pytest.mark.parametrize("door", DOORS)
def test_both_passes_run_the_same_kernel(door: str) -> None:
    def layer(x: Tensor) -> Tensor:
        return DOORS[door](x, True)

    with use_backend("flex", "math"), spied() as ran:
        actual = gradient(lambda x: checkpoint(layer, x, use_reentrant=True))
        assert set(ran) == {"math"}
        assert torch.equal(actual, gradient(layer))


@pytest.mark.parametrize("door", DOORS)
def test_inference_may_choose_kernels_without_a_backward(door: str) -> None:
    with use_backend("flex", "math"), spied() as ran, torch.no_grad():
        DOORS[door](torch.randn(2, TOKENS, HEADS * HEAD_DIM), False)
    assert set(ran) == {"flex"}


def test_a_layer_in_training_mode_may_name_a_kernel_without_a_backward() -> None:
    """As long as no gradient is required: a module is in training mode until it is switched to evaluation."""
    q = torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    with spied() as ran, torch.no_grad():
        out, lse = attention_of_layer(q, q, q, trains=True, backend="flex", causal=True, return_lse=True)
    assert ran == ["flex"]
    right, lse_right = attention(q, q, q, backend="math", causal=True, return_lse=True)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(lse, lse_right)
    with pytest.raises(NoBackendError, match="backward: FlexAttention on CPU has no gradient"):
        attention_of_layer(q.requires_grad_(), q, q, trains=True, backend="flex")


@pytest.mark.parametrize("backend", ["flex", ("flex", "sdpa_cudnn")])
def test_a_refusal_is_found_once(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error has every backend's reasons, so building one in every call would be slow."""
    q = torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    with torch.no_grad():
        attention_of_layer(q, q, q, trains=True, backend=backend)
        monkeypatch.setattr(NoBackendError, "__init__", lambda *_: pytest.fail("a call built the error again"))
        attention_of_layer(q, q, q, trains=True, backend=backend)


@pytest.mark.parametrize("recorded", [True, False])
def test_frozen_layers_choose_the_same_with_and_without_gradients(
    recorded: bool,
) -> None:
    """q, k and v of a layer without adapters require no gradient in the second pass either."""
    q = torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    bias = torch.zeros(1, HEADS, TOKENS, TOKENS).requires_grad_()
    with spied() as ran, torch.set_grad_enabled(recorded):
        attention_of_layer(q, q, q, trains=True, backend=("flex", "math"))
        attention_of_layer(q, q, q, trains=True, backend=("flex", "math"), bias=bias)
    assert ran == ["math", "math"]


def test_dropout_is_drawn_as_by_a_call_with_gradients() -> None:
    q = torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        with torch.set_grad_enabled(recorded):
            results.append(attention_of_layer(q, q, q.clone().requires_grad_(recorded), trains=True, dropout=0.5))
    assert torch.equal(*results)
