"""Tests ``module.Attention`` and a transformers model with their heads split over two gloo ranks: equal to one
process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import Failed, World, in_ranks

pytestmark = pytest.mark.sampled

SCENES = "tensor_parallel_scenes"
LAYERS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "as many key heads": ({"num_heads": 4, "causal": True}, None),
    "grouped heads": ({"num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "value_dim": 7, "window": (2, 1)}, None),
    "sinks": ({"num_heads": 4, "num_kv_heads": 2, "sinks": True, "causal": True, "softcap": 2.0}, None),
    "documents": ({"num_heads": 4, "num_kv_heads": 2, "causal": True, "use_bias": False, "rotary": True}, [3, 4]),
}
REFUSED: dict[str, tuple[dict[str, Any], bool, str]] = {
    "one key head": (
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 6},
        True,
        "ShapeError: num_heads=4, num_kv_heads=1: expected q_proj, k_proj and v_proj to be split over ranks whose "
        "number divides both; got projections that give this rank 2 heads of q, 0.5 of k and 0.5 of v",
    ),
    "three heads": ({"num_heads": 3, "head_dim": 8}, True, "ShapeError: num_heads=3, num_kv_heads=3: expected"),
    "whole sinks": ({"num_heads": 4, "sinks": True}, False, "sink"),
}


OF_A_MODEL = "test_a_model_that_transformers_splits_equals_the_whole_model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor_parallel")


def tiny(folder: Path) -> tuple[Any, Any]:
    """A small Llama, saved, with its token ids; (None, None) without transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported, so that no test reaches for the network
    try:
        import transformers
    except ImportError:
        return None, None
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=98, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    for parameter in made.parameters():
        parameter.data.mul_(5) if parameter.dim() > 1 else None
    made.save_pretrained(folder)
    return made, torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, folder: Path) -> Any:
    """The result of every rank for a job. Ranks run the jobs of the tests that are selected."""
    here = {test.name.rstrip("]").rpartition("[")[2] for test in request.session.items if test.path == request.path}
    jobs: dict[str, tuple[str, str, Any]] = {name: (SCENES, "layer", case) for name, case in LAYERS.items()}
    jobs |= {name: (SCENES, "refusal", case[:2]) for name, case in REFUSED.items()}
    jobs = {name: job for name, job in jobs.items() if name in here}
    made, ids = tiny(folder / "model") if OF_A_MODEL in here else (None, None)
    if made is not None:
        jobs["model"] = SCENES, "model", (str(folder / "model"), ids.tolist())
    actual = in_ranks([World("heads", 2, jobs)], folder, seconds=550)["heads"]

    def results_of(job: str) -> list[Any]:
        for rank, results in enumerate(actual):
            assert not isinstance(results.get(job), Failed), f"rank {rank}: {results[job].text}"
            assert job in results, f"rank {rank} did not come to {job}"
        return [results[job] for results in actual]

    return results_of


@pytest.mark.parametrize("name", LAYERS)
def test_a_split_layer_equals_the_whole_layer(ranks: Any, name: str) -> None:
    """The output, and the gradients of the input and of every parameter."""
    for errors in ranks(name):
        assert len(errors) >= 6
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_split_are_refused(ranks: Any, name: str) -> None:
    for message in ranks(name):
        assert REFUSED[name][2] in message


@pytest.mark.slow
def test_a_model_that_transformers_splits_equals_the_whole_model(ranks: Any, folder: Path) -> None:
    """Logits and generated tokens, compared with transformers' own attention in one process."""
    transformers = pytest.importorskip("transformers")
    made = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").eval()
    ids = torch.randint(2, 97, (2, 7), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = made(ids).logits
        written = made.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert expected.abs().max() > 0.5
    for actual in ranks("model"):
        assert actual["rows of q_proj"] == 16  # two of four heads
        torch.testing.assert_close(torch.from_numpy(actual["logits"]), expected, rtol=1e-4, atol=1e-4)
        assert actual["written"] == written.tolist()
