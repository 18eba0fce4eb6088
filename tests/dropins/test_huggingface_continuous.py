"""Tests that transformers' continuous batching runs on our attention, and writes what ``generate`` writes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers_models import build

from attn_core import SpecError
from torch_frontend import huggingface
from torch_frontend.huggingface import attention, continuous_batching

pytestmark = pytest.mark.sampled

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 96}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 6},
    "Gemma2": {"sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}
"""Full attention; a window; both with a softcap; both with sinks."""
PROMPTS = [[5, 17, 3, 88, 2], list(range(1, 24)), [44], [9, 9, 8, 7, 60, 61, 62, 63, 64]]


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    huggingface.register()
    yield
    huggingface.register()  # other tests use the names


def model_of(name: str, implementation: str = "attn_core") -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    return build(config, implementation, seed=3, noise=0.0)


def settings(**changes: Any) -> Any:
    """A small cache, and batches that cut the longest prompt into chunks."""
    known = inspect.signature(ContinuousBatchingConfig).parameters
    page = "page_size" if "page_size" in known else "block_size"  # by version
    return ContinuousBatchingConfig(**{page: 8, "num_blocks": 24, "max_batch_tokens": 16, **changes})


def generation(tokens: int = 9) -> Any:
    return transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0, eos_token_id=96)


def alone(model: Any) -> list[list[int]]:
    rows = [model.generate(torch.tensor([row]), generation_config=generation())[0] for row in PROMPTS]
    return [row[len(prompt) :].tolist() for row, prompt in zip(rows, PROMPTS, strict=True)]


def together(model: Any, **changes: Any) -> list[list[int]]:
    results = model.generate_batch(
        PROMPTS,
        generation_config=generation(),
        continuous_batching_config=settings(**changes),
        progress_bar=False,
    )
    return [list(result.generated_tokens) for result in results.values()]


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_has_the_tokens_of_generate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    ours = attention.attend_to_cache
    monkeypatch.setattr(attention, "attend_to_cache", lambda *each: calls.append(each[5]) or ours(*each))
    model = model_of(name)
    right = alone(model_of(name, "eager"))
    assert len({tuple(row) for row in right}) > 1 and alone(model) == right
    assert not calls
    assert together(model) == right
    assert set(calls) == ({None} if name == "Llama" else {6} if name == "Mistral" else {None, 6})
    # the model is as before, so an ordinary forward pass works beside the batches
    assert model.config._attn_implementation == "attn_core" and alone(model) == right


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_in_bfloat16(name: str, device: str) -> None:
    """Each token is the choice of the same model in float32, or so near to it that rounding may turn it."""
    model = model_of(name).to(device, torch.bfloat16)
    exact = model_of(name, "eager").bfloat16().float()
    written = together(model)
    assert all(len(row) == 9 or row[-1] == 96 for row in written)
    turned = 0
    for prompt, row in zip(PROMPTS, written, strict=True):
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + row])).logits[0, len(prompt) - 1 : -1]
        behind = logits.max(-1).values - logits.gather(1, torch.tensor(row)[:, None])[:, 0]
        spread = logits.std(-1)
        assert (behind <= 0.25 * spread).all(), (prompt, row, behind / spread)
        turned += int((behind > 0).sum())
    assert turned <= 4, "more near ties than rounding explains"


def test_a_model_trains_while_its_manager_lives() -> None:
    # Both before the manager's thread starts: weights come from torch's global generator.
    model, expected = model_of("Llama"), model_of("Llama", "eager")
    manager = model.init_continuous_batching(generation_config=generation(), continuous_batching_config=settings())
    manager.start()
    try:
        row = torch.tensor([PROMPTS[0]])
        model(input_ids=row, labels=row).loss.backward()
        expected(input_ids=row, labels=row).loss.backward()
        name = "model.layers.0.self_attn.q_proj.weight"
        gradients = [dict(each.named_parameters())[name].grad for each in (model, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    finally:
        manager.stop(block=True)


def test_a_backend_by_name_runs_batches() -> None:
    assert together(model_of("Llama", "attn_core:math")) == alone(model_of("Llama", "eager"))


def test_a_layers_backend_counts_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, backends = model_of("Llama"), []
    run = continuous_batching.attention

    def seen(*operands: Any, **options: Any) -> Any:
        backends.append(options["backend"])
        return run(*operands, **options)

    monkeypatch.setattr(continuous_batching, "attention", seen)
    huggingface.set_layer_backends(model, {1: "math"})
    together(model)
    assert backends[:4] == [None, "math", None, "math"]


@pytest.mark.parametrize("fault", ["window", "offsets", "causal"])
def test_planted_faults_change_the_tokens(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = alone(model_of("Mistral", "eager"))
    run = continuous_batching.attention

    def wrong(*operands: Any, **options: Any) -> Any:
        if fault == "window":
            options["window"] = 5
        if fault == "causal":
            options |= {"causal": False, "window": None}
        if fault == "offsets":
            info = options["seq_info"]
            moved = info.cu_seqlens_k.clone()
            moved[1:-1] = torch.clamp(moved[1:-1] - 1, min=0)
            options["seq_info"] = type(info)(info.cu_seqlens_q, moved, info.max_len_q, info.max_len_k + 1)
        return run(*operands, **options)

    monkeypatch.setattr(continuous_batching, "attention", wrong)
    assert together(model_of("Mistral")) != right


def test_without_registration_transformers_refuses_the_name() -> None:
    model = model_of("Llama")
    huggingface.unregister()
    with pytest.raises((ValueError, KeyError), match="attn_core"):
        together(model, **_without_flash())


def _without_flash() -> dict[str, Any]:
    known = inspect.signature(ContinuousBatchingConfig).parameters
    return {"auto_switch_to_flash": False} if "auto_switch_to_flash" in known else {}


def test_registration_is_undone_and_idempotent() -> None:
    manager = continuous_batching.manager()
    wrapped = manager.switch_to_cb_friendly_attn
    huggingface.register()
    assert manager.switch_to_cb_friendly_attn is wrapped
    huggingface.unregister()
    assert manager.switch_to_cb_friendly_attn is wrapped.__wrapped__
    huggingface.register()
    switch = manager.switch_to_cb_friendly_attn

    def of_another_library(self: Any, *arguments: Any) -> Any:
        return switch(self, *arguments)

    of_another_library.__wrapped__ = switch  # type: ignore[attr-defined]
    manager.switch_to_cb_friendly_attn = of_another_library
    huggingface.unregister()
    assert manager.switch_to_cb_friendly_attn is of_another_library
    manager.switch_to_cb_friendly_attn = wrapped.__wrapped__


def test_other_attention_is_the_managers_own_affair() -> None:
    right = alone(model_of("Llama", "sdpa"))
    assert together(model_of("Llama", "sdpa"), **_without_flash()) == right


# Refusals


def keywords(**changes: Any) -> dict[str, Any]:
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 2, "max_length_k": 2}
    return {**lengths, "write_index": [torch.arange(3)], "read_index": [torch.arange(0)], **changes}


def attend(mask: Any = None, **changes: Any) -> Any:
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16)
    layer = torch.nn.Identity()
    layer.layer_idx = 0  # type: ignore[assignment]
    return attention.attend(layer, q, k, v, mask, **{"is_causal": True, **keywords(**changes)})


def test_a_good_call_of_a_layer_is_taken() -> None:
    assert attend()[0].shape == (1, 3, 4, 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"block_table": torch.zeros(1, 2, 4, dtype=torch.int32)},
            "block_table: expected None, .* max_blocks_per_request=0",
        ),
        ({"mask": torch.zeros(1, 1, 3, 3)}, "attention_mask: expected the model's own causal mask"),
        ({"position_bias": torch.zeros(1, 4, 3, 3)}, "position_bias=a tensor of shape"),
        ({"indices": torch.zeros(1, 3, 2, dtype=torch.long)}, "indices=a tensor of shape"),
        ({"output_attentions": True}, "output_attentions=True: fused kernels never hold the weights"),
        ({"is_causal": False}, "is_causal=False: expected causal"),
        ({"cu_seq_lens_q": None}, "cu_seq_lens_q: expected a value"),
        ({"max_length_q": None}, "max_length_q: expected all of"),
        ({"cache": object()}, "cache: expected transformers' PagedAttentionCache, got object"),
    ],
)
def test_what_a_batch_cannot_have_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        attend(**changes)


def test_the_prefix_of_older_versions_is_refused_with_the_version() -> None:
    model = model_of("Llama")
    with pytest.raises(
        SpecError, match=rf"expected 'attn_core' without paged\|; .* {transformers.__version__} takes it"
    ):
        model.set_attn_implementation("paged|attn_core")


def test_a_version_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous_batching, "manager", lambda: None)
    huggingface.register()  # nothing to wrap
    model = model_of("Llama")
    with pytest.raises(SpecError, match=rf"{transformers.__version__} cannot take it, versions from 5\.17 on do"):
        model.set_attn_implementation("paged|attn_core")
