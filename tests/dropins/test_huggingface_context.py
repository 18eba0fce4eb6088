"""Tests transformers' models on two gloo ranks under ``use_context_parallel``: equal to one process, or refused by
name."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Failed, World, once

pytestmark = pytest.mark.sampled

SCENES = "context_huggingface_scenes"
DOCUMENTS = (4, 7, 2)
TRAINED: list[tuple[str, dict[str, Any], Any, str]] = [
    ("llama", {}, None, "plain"),
    ("llama", {"strategy": "ring"}, DOCUMENTS, "plain"),
    ("llama", {"strategy": "ring", "layout": "documents"}, DOCUMENTS, "plain"),
    ("llama", {"strategy": "ring", "layout": "striped"}, None, "recomputed"),
    ("llama", {"strategy": "ulysses", "layout": "contiguous"}, None, "masked"),
    ("gemma2", {"strategy": "ring"}, None, "plain"),
    ("gemma2", {"strategy": "all_gather"}, None, "recomputed"),
    ("gemma2", {"strategy": "ring", "layout": "window:5"}, None, "plain"),
    ("gemma2", {"strategy": "all_gather", "layout": "documents"}, DOCUMENTS, "recomputed"),
    ("gpt_oss", {"strategy": "ring", "layout": "contiguous"}, None, "plain"),
    ("mistral", {"strategy": "ulysses"}, None, "plain"),
]
REFUSED = {
    "padding": "SpecError: attention_mask: expected no padding in context parallelism, got 1 tokens of it",
    "a row's mask": "SpecError: attention_mask: expected this rank's shard [batch, 7], got shape [2, 13]",
    "a row's mask, no cache": "SpecError: attention_mask: expected this rank's shard [batch, 7], got shape [2, 13];",
    "table": "SpecError: attention_mask: expected None in context parallelism",
    "cache": "SpecError: past_key_values: expected none with content in context parallelism, got 8 keys for 1 queries",
    "static cache": "SpecError: past_key_values: expected none with content",
    "generate": "SpecError: past_key_values: expected none with content",
    "offsets": "SpecError: cu_seq_lens_q: expected None in context parallelism",
    "position_bias": "SpecError: position_bias: expected None in context parallelism",
    "dropout": "SpecError: dropout=0.1: expected 0 in context parallelism",
    "chunks": "SpecError: attention_mask: expected a causal mask, a sliding window or none in context parallelism",
    "a mask from outside": "SpecError: attention_mask: expected one built inside the use_context_parallel block",
    "the window of a layer": "SpecError: sliding_window=9: the model's mask has no window; they must agree",
    "the mask as a table": "SpecError: attention_mask: expected a model that hands its mask on to attention",
}


def id_of(case: tuple[Any, ...]) -> str:
    family, options, documents, how = case
    return " ".join([family, *options.values(), *(["packed"] if documents else []), how])


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of every rank for a job that a test of this run judges."""
    here = {test.name for test in request.session.items if test.path == request.path}
    jobs: dict[str, Any] = {"refusals": (SCENES, "refusals", ()), "padding": (SCENES, "padding_on_one_rank", ())}
    if test_a_compiled_model_inside_a_block_gives_the_same_logits.__name__ in here:
        jobs["compiled"] = (SCENES, "compiled", ())
    for case in TRAINED:
        if f"{test_a_model_on_shards_equals_the_whole_model.__name__}[{id_of(case)}]" in here:
            jobs[id_of(case)] = (SCENES, "trained", case)
    _, given = once([World("models", 2, jobs)], "models", tmp_path_factory, seconds=550)
    actual = given["models"]

    def results_of(job: str) -> list[Any]:
        for rank, results in enumerate(actual):
            assert not isinstance(results.get(job), Failed), f"rank {rank}: {results[job].text}"
            assert job in results, f"rank {rank} did not come to {job}"
        return [results[job] for results in actual]

    return results_of


@pytest.mark.parametrize("case", TRAINED, ids=id_of)
def test_a_model_on_shards_equals_the_whole_model(ranks: Any, case: tuple[Any, ...]) -> None:
    """The logits of every token, and the gradient of every parameter, summed over ranks."""
    for errors in ranks(id_of(case)):
        assert len(errors) > 10
        assert max(errors.values()) < 1e-4, {name: error for name, error in errors.items() if error >= 1e-4}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused(ranks: Any, name: str) -> None:
    for actual in ranks("refusals"):
        assert actual.keys() == REFUSED.keys()
        assert REFUSED[name] in actual[name]


def test_padding_that_one_rank_holds_is_refused_on_every_rank(ranks: Any) -> None:
    for text, error in ranks("padding"):
        assert text.startswith("SpecError: context_parallel_attention: expected the same call on every rank")
        assert "rank 0: SpecError: attention_mask: expected no padding in context parallelism" in text
        assert error == 0.0


@pytest.mark.slow
def test_a_compiled_model_inside_a_block_gives_the_same_logits(ranks: Any) -> None:
    assert max(ranks("compiled")) < 1e-5
