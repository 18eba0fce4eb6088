"""Runs whole models whose attention layers call run_attention as Unsloth's do, against transformers' eager models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import unsloth_models
from unsloth_models import DOCUMENTS, KINDS, TOKENS, batch, largest_difference, packed_positions, packed_row, result

from examples.unsloth.layers import patch

kinds = pytest.mark.parametrize("kind", KINDS)


def close(actual: Any, expected: Any) -> None:
    logits, gradients = largest_difference(actual, expected)
    assert logits < 1e-5 and gradients < 1e-5, (logits, gradients)


@pytest.fixture(autouse=True)
def eager_is_not_flat() -> None:
    """A flat attention would hide a wrong one."""
    logits = unsloth_models.build("llama")(batch().ids).logits
    assert logits.std() > 0.1


@kinds
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_rows_with_and_without_padding(kind: str, side: str | None) -> None:
    model, rows = patch(unsloth_models.build(kind)), batch(side)
    masks = {} if side is None else {"attention_mask": rows.keep, "keep": rows.keep}
    logits = model(rows.ids, **masks, use_cache=False).logits[rows.keep.bool()]
    close(result(model, logits), unsloth_models.eager_rows(kind, side))


@kinds
@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_documents_equal_each_document_alone(kind: str, checkpointed: bool) -> None:
    model = patch(unsloth_models.build(kind))
    if checkpointed:
        model.train()
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": True})
        model.enable_input_require_grads()
    lengths = torch.tensor(DOCUMENTS, dtype=torch.int32)
    out = model(packed_row(), position_ids=packed_positions(), packed_seq_lengths=lengths, use_cache=False)
    if checkpointed:  # re-entrant checkpoints give gradients only to backward()
        weights = torch.cos(torch.arange(out.logits[0].numel(), dtype=torch.float64)).view_as(out.logits[0])
        (out.logits[0] * weights).sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        actual = unsloth_models.Result(out.logits[0].detach(), gradients)
    else:
        actual = result(model, out.logits[0])
    close(actual, unsloth_models.eager_documents(kind))


@kinds
@pytest.mark.parametrize("chunks", [(6, 1, 1, 1, 1, 1), (5, 4, 2), (1, 10)])
def test_decoding_with_a_cache_equals_the_whole_row(kind: str, chunks: tuple[int, ...]) -> None:
    from transformers import DynamicCache

    assert sum(chunks) == TOKENS
    model, cache, outs = patch(unsloth_models.build(kind)).eval(), DynamicCache(), []
    with torch.no_grad():
        for part in batch().ids.split(chunks, 1):
            outs.append(model(part, past_key_values=cache, use_cache=True).logits)
        expected = unsloth_models.build(kind).eval()(batch().ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(outs, 1), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("form", ["two axes", "four axes"])
def test_gemma2_with_softcapping_and_a_static_mask(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Unsloth's Gemma 2 without FlashAttention: the masks of all positions, with the lowest number as hidden."""
    from examples.unsloth import layers
    from torch_frontend.unsloth import slow_attention_softcapping

    def softcapped(*, config: Any, context: Any, Q: Any, K: Any, V: Any) -> Any:
        rows = 64 if form == "two axes" else TOKENS
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        hidden = (distance < 0) | (distance >= (context.sliding_window or rows))
        mask = torch.zeros(rows, rows, dtype=Q.dtype).masked_fill(hidden, torch.finfo(Q.dtype).min)
        settings = SimpleNamespace(query_pre_attn_scalar=24, attn_logit_softcapping=1.5)
        layer = SimpleNamespace(config=settings, training=False)
        mask = mask if form == "two axes" else mask.expand(2, 1, -1, -1)
        out = slow_attention_softcapping(Q, K, V, mask, layer, context.bsz, context.kv_seq_len)
        return out.unflatten(-1, (context.n_heads, context.head_dim))

    monkeypatch.setattr(layers, "run_attention", softcapped)
    test_rows_with_and_without_padding("gemma2", None)
    if form == "two axes":
        test_decoding_with_a_cache_equals_the_whole_row("gemma2", (5, 4, 2))


@pytest.mark.parametrize("fault", ["window", "softcap", "scale", "documents", "padding"])
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from examples.unsloth import layers

    real = layers.run_attention

    def wrong(*, config: Any, context: Any, **tensors: Any) -> Any:
        bags = config.flash_dense_kwargs
        if fault == "window" and context.sliding_window is not None:
            context.sliding_window += 1
            bags |= {"window_size": (context.sliding_window - 1, 0)}
        elif fault == "softcap":
            bags |= {"softcap": 1.51}
        elif fault == "scale":
            bags |= {"softmax_scale": bags["softmax_scale"] * 1.01}
        elif fault == "documents":
            context.seq_info = None
        elif fault == "padding":
            context.attention_mask = None
        config = SimpleNamespace(**vars(config) | {"flash_varlen_kwargs": None})
        return real(config=config, context=context, **tensors)

    monkeypatch.setattr(layers, "run_attention", wrong)
    check = {
        "documents": lambda: test_packed_documents_equal_each_document_alone("gemma2", False),
        "padding": lambda: test_rows_with_and_without_padding("gemma2", "left"),
    }.get(fault, lambda: test_rows_with_and_without_padding("gemma2", None))
    with pytest.raises(AssertionError):
        check()
