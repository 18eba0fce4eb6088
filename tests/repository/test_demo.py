"""Tests both sides of the demo on a tiny random Llama: the same tokens, and every layer's attention bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_llama import tiny_llama

from examples.smollm2 import decoding, packing

PROMPTS = [[5, 17, 3], [11], [2, 29, 31, 7, 13, 23, 19]]
NEW_TOKENS = 5
STOP = 1


def test_a_step_moves_every_document_to_its_place() -> None:
    # two documents of one and two tokens: [10, 11], [20]; three slots are unused
    cache = np.array([10, 11, 20, 0, 0, 0])
    step = packing.pack([2, 1], [[12], [21, 22]], capacity=7)
    grown = np.concatenate([np.append(cache, 0), step.tokens])[step.source]
    assert grown[:6].tolist() == [10, 11, 12, 20, 21, 22]
    assert step.positions.tolist() == [2, 1, 2]
    assert (step.lengths_q, step.lengths_k) == ((1, 2, 0), (3, 3, 1))
    assert step.last.tolist() == [0, 2]


def test_documents_that_outgrow_the_cache_are_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens, more than the capacity of 6"):
        packing.pack([3, 2], [[1], [1]], capacity=6)


def test_a_stopped_document_is_cut_at_its_end() -> None:
    def forward(step: packing.PackedStep) -> np.ndarray:  # the model predicts the predecessor of every token
        return np.eye(9, dtype=np.float32)[step.tokens - 1]

    result = decoding.greedy(forward, [[4], [9, 3]], 6, stop=1)
    assert result.tokens == [[3, 2], [2]]
    assert len(result.decode_seconds) == 2  # generation stops when every document has stopped


def test_which_outcomes_count_as_failure() -> None:
    pytest.importorskip("rich")
    from examples.smollm2.report import Report

    class Check:  # the outcome of one layer
        def __init__(self, equal: bool) -> None:
            self.equal = equal

    def failures(**changes: object) -> list[str]:
        texts = {"torch_texts": ["It is Paris."], "jax_texts": ["It is Paris."], "questions": ["Where?"]}
        numbers = dict.fromkeys(("reread_tokens_differ", "logit_difference", "largest_logit", "smallest_lead"), 0)
        rest = {"weights": "", "versions": {}, "selections": {}, "seconds": {}, "memory_gib": 0.0}
        well = {"layers": [Check(True)], "same_tokens": True, **texts, **numbers, **rest}
        return Report(**{**well, **changes}).failures()

    assert failures() == []
    assert "different texts" in failures(jax_texts=["It is Lyon."])[0]
    assert "different texts" in failures(same_tokens=False)[0]
    assert "Paris" in failures(torch_texts=["Lyon."], jax_texts=["Lyon."])[0]
    assert "1 of 2 layer calls" in failures(layers=[Check(True), Check(False)])[0]
    assert failures(layers=[])
    assert failures(reread_tokens_differ=1)


def registered_llama():  # type: ignore[no-untyped-def]
    """A tiny Llama on the demo's attention."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from examples.smollm2 import torch_side

    torch_side.register()
    return tiny_llama(torch_side.NAME)


@pytest.fixture(scope="module")
def generations():  # type: ignore[no-untyped-def]
    """(torch's generation, JAX's generation, the captured layers, the Flax model)."""
    pytest.importorskip("flax")
    model = registered_llama()
    from examples.smollm2 import jax_side, torch_side

    capacity = decoding.capacity_for(PROMPTS, NEW_TOKENS)
    in_torch = torch_side.TorchForward(model, capacity, capture_steps=2)
    ours = decoding.greedy(in_torch, PROMPTS, NEW_TOKENS, STOP)
    twin = jax_side.convert(model)
    in_jax = jax_side.JaxForward(twin, capacity)
    for new in (PROMPTS, [[0]] * len(PROMPTS)):
        in_jax.compile(packing.pack([0] * len(PROMPTS), new, capacity))
    return ours, decoding.greedy(in_jax, PROMPTS, NEW_TOKENS, STOP), in_torch.captured, twin


@pytest.mark.slow
def test_torch_and_jax_write_the_same_tokens(generations) -> None:  # type: ignore[no-untyped-def]
    ours, theirs, _, _ = generations
    assert ours.tokens == theirs.tokens
    assert all(ours.tokens)
    difference = np.abs(ours.prefill_logits - theirs.prefill_logits).max()
    assert difference < ours.lead / 10, "a lead this small could be noise: choose another seed"


@pytest.mark.slow
def test_every_layer_is_bit_equal(generations) -> None:  # type: ignore[no-untyped-def]
    from examples.smollm2 import layers

    checks = layers.compare(generations[2])
    assert [(check.layer, check.queries) for check in checks] == [(0, 11), (1, 11), (0, 3), (1, 3)]
    assert all(check.equal for check in checks)


@pytest.mark.slow
def test_results_do_not_depend_on_the_packed_cache(generations) -> None:  # type: ignore[no-untyped-def]
    from examples.smollm2 import jax_side

    _, theirs, _, twin = generations
    assert decoding.reread_difference(lambda rows: jax_side.reread(twin, rows), PROMPTS, theirs.tokens) == 0


@pytest.mark.slow
def test_torch_agrees_with_each_prompt_alone_without_our_attention(generations) -> None:  # type: ignore[no-untyped-def]
    import torch

    model = registered_llama()
    model.set_attn_implementation("eager")
    start = 0
    for prompt in PROMPTS:
        with torch.inference_mode():
            alone = model(input_ids=torch.tensor([prompt])).logits[0].numpy()
        packed = generations[0].prefill_logits[start : start + len(prompt)]
        np.testing.assert_allclose(packed, alone, rtol=0, atol=2e-5 * np.abs(alone).max())
        start += len(prompt)
