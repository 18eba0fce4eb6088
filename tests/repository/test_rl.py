"""Tests the example that samples from pages and scores in packed training: equal bits, and a fault is caught."""

from __future__ import annotations

from copy import deepcopy
from io import StringIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_llama import tiny_llama

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from attn_core.backends.math import fixed_tiles
from examples.rl import report, rows, run, sampling
from examples.rl.run import Options, Outcome, compare
from examples.rl.torch_side import TorchPolicy, by_blocks, layers_in_blocks

VOCABULARY = 97
positions = st.lists(st.integers(0, 60), min_size=1, max_size=50)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama("eager")


@pytest.fixture(scope="module")
def parts() -> Any:
    pytest.importorskip("flax")
    from examples.rl.jax_side import parts_of
    from examples.smollm2.jax_side import convert

    return parts_of(convert(tiny_llama("eager")))


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(2, VOCABULARY, length).tolist() for length in lengths]


def policy_of(model: Any, prompts: Any, options: Options, page_size: int, **how: Any) -> Any:
    pages = sampling.pages_for(prompts, options.samples, options.new_tokens, page_size)
    if isinstance(model, torch.nn.Module):
        return TorchPolicy(deepcopy(model), num_pages=pages, page_size=page_size, **how)
    from examples.rl.jax_side import JaxPolicy

    return JaxPolicy(model, num_pages=pages, page_size=page_size, **how)


# Blocks of rows


@given(positions, st.integers(1, 20))
def test_a_position_has_its_row_in_as_few_blocks_as_possible(places: list[int], size: int) -> None:
    plan = rows.in_blocks(np.array(places), size)
    assert (plan.slots % size == np.array(places) % size).all()
    assert len(set(plan.slots.tolist())) == len(places)
    assert plan.blocks == np.bincount(np.array(places) % size).max() and plan.count == plan.blocks * size
    spread = plan.spread(np.arange(1, len(places) + 1))
    assert spread[plan.slots].tolist() == list(range(1, len(places) + 1)) and (spread > 0).sum() == len(places)


def test_only_tokens_in_their_order_are_whole() -> None:
    assert rows.as_they_are(np.arange(16)).whole and rows.in_blocks(np.arange(16), 16).whole
    assert not rows.in_blocks(np.arange(3, 19), 16).whole and not rows.in_blocks(np.arange(32), 16).whole


def among_others(places: list[int], chosen: list[int]) -> Any:
    """Rows of all tokens, of some of them, and for both the indices of these tokens' rows."""
    some = [places[each] for each in chosen]
    every, few = rows.in_blocks(np.array(places)), rows.in_blocks(np.array(some))
    return every, few, every.slots[chosen], few.slots


@settings(max_examples=5)
@given(positions, st.data())
def test_a_layers_row_does_not_depend_on_the_rows_beside_it(llama: Any, places: list[int], data: Any) -> None:
    """For every layer of the torch model: the rows of some tokens, alone and among all."""
    chosen = data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, unique=True))
    every, few, here, there = among_others(places, chosen)
    numbers = torch.Generator().manual_seed(len(places))

    def of(layer: Any) -> tuple[torch.Tensor, ...]:
        if isinstance(layer, torch.nn.Embedding):
            return (torch.randint(VOCABULARY, (1, every.count), generator=numbers),)
        width = getattr(layer, "in_features", 48 if hasattr(layer, "weight") else 80)
        x = torch.randn(1, every.count, width, generator=numbers)
        return (x, torch.from_numpy(every.spread(np.array(places)))[None]) if hasattr(layer, "inv_freq") else (x,)

    with layers_in_blocks(llama, rows.ROWS), torch.no_grad():
        for layer in llama.modules():
            if list(layer.children()):
                continue
            whole = of(layer)
            apart = [x.new_zeros(1, few.count, *x.shape[2:]) for x in whole]
            for x, all_rows in zip(apart, whole, strict=True):
                x[:, there] = all_rows[:, here]
            for together, alone in zip(*(as_tuple(layer(*x)) for x in (whole, apart)), strict=True):
                assert torch.equal(together[:, here], alone[:, there]), type(layer).__name__


def as_tuple(results: Any) -> tuple[Any, ...]:
    return results if isinstance(results, tuple) else (results,)


@pytest.mark.parametrize("seed", range(3))
def test_a_parts_row_does_not_depend_on_the_rows_beside_it(parts: Any, seed: int) -> None:
    """For every compiled part of the JAX model."""
    jax = pytest.importorskip("jax")
    from examples.rl.jax_side import by_blocks as jax_blocks

    random = np.random.default_rng(seed)
    places = random.integers(0, 60, 40).tolist()
    every, few, here, there = among_others(places, random.permutation(40)[: 5 + seed].tolist())
    layer, ends = parts.weights[0][0], parts.weights[1]

    def blocks(array: np.ndarray, size: int = rows.ROWS) -> list[Any]:
        return list(array.reshape(-1, size, *array.shape[1:]))

    x = random.standard_normal((every.count, 48)).astype(np.float32)
    heads = random.standard_normal((every.count, 3, 16)).astype(np.float32)
    numbers = random.integers(0, 60, every.count).astype(np.int32)
    calls = {
        "embed": (ends, numbers),
        "heads": (layer, x, numbers),
        "join": (layer, x, heads),
        "end": (ends, x),
    }
    for name, (state, *whole) in calls.items():
        apart = [np.zeros((few.count, *array.shape[1:]), array.dtype) for array in whole]
        for some, array in zip(apart, whole, strict=True):
            some[there] = array[here]
        both = (jax_blocks(getattr(parts, name), state, *map(blocks, each)) for each in (whole, apart))
        lists = [
            jax.tree.leaves(jax.tree.map(np.concatenate, each, is_leaf=lambda x: isinstance(x, list))) for each in both
        ]
        for together, alone in zip(*lists, strict=True):
            assert together[here].tobytes() == alone[there].tobytes(), name


def test_gradients_in_blocks_are_those_of_all_rows() -> None:
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(5, 3, bias=False).double(), torch.randn(1, 8, 5, dtype=torch.float64)
    both = []
    for compute in (linear, lambda x: by_blocks(linear.forward, 4, x, parameters=(linear.weight,))):
        inputs = x.clone().requires_grad_()
        loss = compute(inputs).square().sum()
        both.append(torch.autograd.grad(loss, (inputs, linear.weight)))
    for plain, blocked in zip(*both, strict=True):
        torch.testing.assert_close(plain, blocked)


# Sampling and training


@settings(max_examples=5)
@given(
    st.integers(0, 2**31),
    st.lists(st.integers(1, 150), min_size=1, max_size=3),
    st.integers(1, 40),
    st.sampled_from((1, 7, 16)),
)
def test_training_scores_as_sampling_did(llama: Any, seed: int, lengths: list[int], chunk: int, page_size: int) -> None:
    prompts, options = prompts_of(seed, *lengths), Options(chunk=chunk, new_tokens=5, seed=seed)
    policy = policy_of(llama, prompts, options, page_size, invariant="prefix")
    outcome, samples = compare("torch", "prefix", policy, prompts, options)
    assert outcome.tokens == outcome.equal == 5 * options.samples * len(lengths) and outcome.difference == 0
    assert len({tuple(each.answer) for each in samples}) > 1, "the samples must differ"
    allocator = policy.cache.allocator
    assert allocator.report().free == allocator.report().num_pages


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "chunk", "page_size"), [(None, 8, 3), ("jax_xla", 21, 16)])
def test_training_scores_as_sampling_did_in_jax(parts: Any, backend: Any, chunk: int, page_size: int) -> None:
    prompts, options = prompts_of(chunk, 21, 40), Options(chunk=chunk, new_tokens=5, seed=chunk)
    policy = policy_of(parts, prompts, options, page_size, invariant="prefix", backend=backend)
    outcome, _ = compare("JAX", "prefix", policy, prompts, options, reward=lambda answer: sum(answer))
    assert outcome.tokens == outcome.equal == 20 and outcome.difference == 0
    assert not report.failures([outcome])


def other_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_tiles, "KEY_TILE", 16)


def other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.in_blocks, "__defaults__", (1,))


@pytest.mark.parametrize("fault", [other_tile, other_rows])
def test_a_fault_in_scoring_is_caught(llama: Any, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """Scoring takes another tile of keys, or other blocks of rows, than sampling."""
    prompts, options = prompts_of(0, 21, 40), Options(new_tokens=8)
    policy = policy_of(llama, prompts, options, 16, invariant="prefix")
    score = policy.score
    monkeypatch.setattr(policy, "score", lambda batch: fault(monkeypatch) or score(batch))
    outcome, _ = compare("torch", "prefix", policy, prompts, options)
    assert outcome.equal < outcome.tokens and 0 < outcome.difference < 1e-4
    assert "log-probabilities differ" in report.failures([outcome])[0]


def test_without_a_promise_bits_differ(llama: Any) -> None:
    """Otherwise the tests above would show nothing."""
    prompts, options = prompts_of(0, 21, 40), Options(new_tokens=8)
    outcome, _ = compare("torch", None, policy_of(llama, prompts, options, 16), prompts, options)
    assert outcome.equal < outcome.tokens and 0 < outcome.difference < 1e-4
    assert not report.failures([outcome, outcome._replace(invariant="prefix", equal=outcome.tokens)])


def test_a_step_in_blocks_is_the_step_of_the_model(llama: Any) -> None:
    """The same samples move the weights alike with and without blocks, and towards what was rewarded."""
    prompts, options = prompts_of(0, 21, 40), Options(new_tokens=8)
    after = []
    for invariant in (None, "prefix"):
        policy = policy_of(llama, prompts, options, 16, invariant=invariant)
        outcome, samples = compare("torch", invariant, policy, prompts, options, reward=lambda answer: sum(answer))
        assert outcome.step is not None and outcome.step[1] > 0
        after.append((samples[0].answer, outcome.step[0], dict(policy.model.named_parameters())))
    assert after[0][0] == after[1][0], "other samples: choose another seed"
    assert after[0][1] == pytest.approx(after[1][1], rel=1e-4)
    for name, weight in after[0][2].items():
        torch.testing.assert_close(weight, after[1][2][name], rtol=1e-4, atol=1e-5)
        assert not torch.equal(weight, dict(llama.named_parameters())[name]), name


def test_what_is_sampled_behind_the_stop_token_is_dropped(llama: Any) -> None:
    prompts, options = prompts_of(0, 5), Options(new_tokens=8)
    policy = policy_of(llama, prompts, options, 4, invariant="prefix")
    how = {"samples": 2, "chunk": 3, "new_tokens": 8, "seed": 0}
    whole = sampling.sample(policy, prompts, **how)
    stop = whole[0].answer[3]
    cut = sampling.sample(policy, prompts, **how, stop=stop)
    assert cut[0].answer == whole[0].answer[: whole[0].answer.index(stop) + 1]
    assert len(cut[0].chosen) == len(cut[0].answer)
    batch = rows.packed(cut)
    assert batch.targets.tolist() == cut[0].answer + cut[1].answer
    assert batch.tokens[batch.scored[0]] == prompts[0][-1] and batch.positions[batch.scored[0]] == 4


def test_advantages_compare_the_answers_to_one_prompt() -> None:
    better = run.advantages(np.array([[1.0, 3.0], [5.0, 5.0]]))
    np.testing.assert_allclose(better, [[-1, 1], [0, 0]], atol=1e-5)


# What it prints


@pytest.mark.parametrize(
    ("changed", "failure"),
    [
        ({}, None),
        ({"equal": 39}, "torch: 1 of 40 log-probabilities differ with invariant='prefix'"),
        ({"equal": 39, "invariant": "batch"}, "nothing ran with invariant='prefix'"),
        ({"step": (2.0, -1e-3)}, "the training step changed the objective by -1.0e-03"),
        ({"step": (float("nan"), 1e-3)}, "the training step changed the objective"),
    ],
)
def test_which_outcomes_are_failures(changed: dict[str, Any], failure: str | None) -> None:
    outcome = Outcome("torch", "prefix", 40, 40, 0.0, 1.5, (2.0, 1e-3))._replace(**changed)
    console = Console(file=StringIO(), width=200)
    assert report.show(console, [outcome]) == int(failure is not None)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("OK" in text) is (failure is None) and (failure or "100%") in text


class Letters:
    """A tokenizer whose tokens are letters."""

    eos_token_id = 1

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return str(messages[-1]["content"])

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 90 + 2 for letter in text]}

    def decode(self, tokens: list[int], **options: Any) -> str:
        return "".join("ab"[token % 2] * (token % 3) for token in tokens)


@pytest.mark.parametrize("fault", [False, True])
def test_the_program_fails_if_a_bit_differs(
    llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: bool
) -> None:
    from examples.rl.__main__ import main
    from examples.smollm2 import weights

    monkeypatch.setattr(weights, "load", lambda: SimpleNamespace(tokenizer=Letters(), model=deepcopy(llama)))
    score = TorchPolicy.score

    def with_other_tile(self: TorchPolicy, batch: rows.Batch) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            other_tile(patch)
            return score(self, batch)

    if fault:
        monkeypatch.setattr(TorchPolicy, "score", with_other_tile)
    assert main(["--framework", "torch", "--new-tokens", "6"]) == int(fault)
    shown = capsys.readouterr().out
    for words in ("invariant", "none", "batch", "prefix", "24", "a step of policy gradients"):
        assert words in shown
    assert ("FAILED" in shown) is fault


def test_a_backend_that_cannot_sample_fails_with_the_reasons(
    llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from examples.rl.__main__ import main
    from examples.smollm2 import weights

    monkeypatch.setattr(weights, "load", lambda: SimpleNamespace(tokenizer=Letters(), model=deepcopy(llama)))
    assert main(["--framework", "torch", "--new-tokens", "2", "--backend", "flex"]) == 1
    assert "backend='flex' cannot run this call" in " ".join(capsys.readouterr().out.split())
