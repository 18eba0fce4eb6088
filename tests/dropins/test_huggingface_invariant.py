"""Tests that a model's tokens have the promised bits: those of the prompt also while transformers decodes."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_llama import tiny_llama

import torch_frontend
from attn_core import SpecError
from torch_frontend import huggingface
from torch_frontend.huggingface import attention as host

Call = tuple[Any, Any, Any, dict[str, Any], Any]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls of attention, in their order: q, k, v, keywords and the output."""
    made: list[Call] = []
    run = host.attention

    def watched(q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        made.append((q, k.clone(), v.clone(), keywords, run(q, k, v, **keywords)))
        return made[-1][4]

    huggingface.register()
    monkeypatch.setattr(host, "attention", watched)
    return made


def whole_prompt(calls: list[Call], mask: Any) -> Any:
    """One causal call of all tokens of a layer, ``[batch, tokens, heads, head_dim]``."""
    q = torch.cat([call[0] for call in calls], 2).transpose(1, 2)
    k, v = (tensor[:, :, : q.shape[1]].transpose(1, 2) for tensor in calls[-1][1:3])
    options = {"causal": True, "scale": calls[0][3]["scale"], "invariant": "prefix"}
    return torch_frontend.attention(q, k, v, mask=mask, **options)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", [0, 5])
def test_decoded_tokens_have_the_bits_of_the_prompt(padding: int, cache: str, calls: list[Call]) -> None:
    model = tiny_llama("attn_core")
    model.config.attn_core_invariant = "prefix"
    tokens = torch.arange(2 * 140).view(2, 140) % 90 + 1  # the decoded tokens are in the second tile of 128
    keep = torch.ones_like(tokens)
    keep[0, :padding] = 0
    caches = {} if cache == "dynamic" else {"cache_implementation": "static"}
    model.generate(tokens, attention_mask=keep, max_new_tokens=4, do_sample=False, pad_token_id=0, **caches)

    first_layer = calls[::2]
    assert [call[0].shape[2] for call in first_layer] == [140, 1, 1, 1]
    assert all(call[3]["invariant"] == "prefix" for call in calls)
    seen = torch.cat([call[4] for call in first_layer], 1)
    visible = torch.ones(2, 143, dtype=torch.bool)
    visible[0, :padding] = False
    expected = whole_prompt(first_layer, visible[:, None, None] if padding else None)
    assert torch.equal(seen[1], expected[1])
    assert torch.equal(seen[0, padding:], expected[0, padding:])


def test_a_window_stays_in_the_call_of_a_decoded_token(calls: list[Call]) -> None:
    model = tiny_llama("attn_core")
    layer = model.model.layers[0].self_attn
    layer.config.attn_core_invariant = "prefix"
    q, k = torch.randn(1, 3, 1, 16), torch.randn(1, 1, 6, 16)
    host.attend(layer, q, k, k, None, sliding_window=9)  # it sees all 6 keys, but a prompt has the window
    assert calls[0][3]["causal"] is True
    assert calls[0][3]["window"] == (8, None)


def test_a_dense_mask_of_one_query_is_the_last_of_a_prompt(calls: list[Call]) -> None:
    model = tiny_llama("attn_core")
    layer = model.model.layers[0].self_attn
    layer.config.attn_core_invariant = "prefix"
    q, k, v = torch.randn(2, 3, 1, 16), torch.randn(2, 1, 7, 16), torch.randn(2, 1, 7, 16)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)[:, None, None]
    out, _ = host.attend(layer, q, k, v, mask)  # as transformers decodes from a static cache on a GPU
    heads = (tensor.transpose(1, 2) for tensor in (q, k, v))
    torch.testing.assert_close(out, torch_frontend.attention(*heads, mask=mask, backend="math"))
    assert calls[0][3]["causal"] is True


def test_other_values_are_refused_by_name(calls: list[Call]) -> None:
    model = tiny_llama("attn_core")
    model.config.attn_core_invariant = "both"
    with pytest.raises(SpecError, match="invariant='both': expected one of batch, prefix, or None"):
        model(torch.ones(1, 3, dtype=torch.long))
