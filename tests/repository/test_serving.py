"""Tests the serving example: on tiny models, answers do not depend on other requests, and no page is wasted or lost."""

from __future__ import annotations

from io import StringIO
from typing import Any

import numpy as np
import pytest
from tiny_llama import tiny_llama

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from attn_core import PageAllocator, PoolFullError, pages_that_fit
from examples.serving import engine, report
from examples.serving.engine import serve
from examples.serving.stream import Stream
from torch_frontend import PagedKVCache

VOCABULARY, WIDTH, HEADS, KV_HEADS, DIM, STOP = 11, 12, 4, 2, 3, 0
LONGEST = 64


class Tiny:
    """One layer of attention in float64 between random matrices; its answers depend on every token and its position."""

    def __init__(self, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.embed = random.standard_normal((VOCABULARY, WIDTH))
        self.place = random.standard_normal((LONGEST, WIDTH))
        self.q, self.k, self.v = (random.standard_normal((WIDTH, heads, DIM)) for heads in (HEADS, KV_HEADS, KV_HEADS))
        self.out = random.standard_normal((HEADS * DIM, VOCABULARY))

    def projected(self, tokens: Any, places: Any) -> list[np.ndarray]:
        """q, k and v ``[tokens, heads, dim]``."""
        x = self.embed[tokens] + self.place[places]
        return [np.einsum("tw,whd->thd", x, weight) for weight in (self.q, self.k, self.v)]

    def logits(self, attended: np.ndarray) -> np.ndarray:
        return attended.reshape(-1, HEADS * DIM) @ self.out

    def answer(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The model's answer to one prompt, from a dense loop that reads everything again for each token."""
        tokens = list(prompt)
        for _ in range(new_tokens):
            q, k, v = self.projected(np.array(tokens), np.arange(len(tokens)))
            rows = []
            for head in range(HEADS):
                scores = k[:, head // (HEADS // KV_HEADS)] @ q[-1, head] / DIM**0.5
                weights = np.exp(scores - scores.max())
                rows.append(weights / weights.sum() @ v[:, head // (HEADS // KV_HEADS)])
            token = int(self.logits(np.stack(rows))[0].argmax())
            if token == STOP:
                break
            tokens.append(token)
        return tokens[len(prompt) :]


class Watched:
    """The model on a cache of pages; checks the pool in every step."""

    def __init__(self, model: Tiny, num_pages: int, page_size: int) -> None:
        sizes = {"num_layers": 1, "kv_heads": KV_HEADS, "head_dim": DIM, "dtype": torch.float64}
        self.cache = PagedKVCache(num_pages=num_pages, page_size=page_size, **sizes)
        for pool in (*self.cache.k_pages, *self.cache.v_pages):
            pool.fill_(torch.nan)
        self.model, self.batches = model, list[int]()

    def __call__(self, tokens: np.ndarray, places: np.ndarray, step: Any) -> np.ndarray:
        allocator = self.cache.allocator
        report = allocator.report()
        assert 0 <= report.waste < allocator.page_size * len(allocator)
        assert tokens.shape == places.shape
        self.batches.append(len(step.seq_lens))
        q, k, v = map(torch.from_numpy, self.model.projected(tokens, places))
        self.cache.update(0, k, v, step)
        return self.model.logits(self.cache.attend(0, q, step).numpy())


def pages_for(prompts: Any, new_tokens: int, page_size: int) -> int:
    """The pages of the prompt that needs most; the last token of an answer is never read."""
    return -(-(max(map(len, prompts)) + new_tokens - 1) // page_size)


def serve_all(prompts: Any, *, num_pages: int, page_size: int, seed: int = 0, **requested: Any) -> tuple[Any, Watched]:
    forward = Watched(Tiny(seed), num_pages, page_size)
    actual = serve(forward, forward.cache, prompts, stop=STOP, **requested)
    assert forward.cache.allocator.report().free == num_pages and not forward.cache.allocator.sequences
    assert actual.steps == len(forward.batches)
    return actual, forward


tokens_of = st.integers(0, VOCABULARY - 1)


@st.composite
def drawn_requests(draw: Any) -> tuple[list[list[int]], int, int, int]:
    """(prompts, new_tokens, page_size, num_pages): prompts may share their beginnings, and the pool may be small."""
    prefix = draw(st.lists(tokens_of, max_size=9))
    tails = draw(st.lists(st.lists(tokens_of, max_size=12), min_size=1, max_size=7))
    prompts = [[*prefix, *tail] or [1] for tail in tails]
    new_tokens, page_size = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    least = pages_for(prompts, new_tokens, page_size)
    return prompts, new_tokens, page_size, least + draw(st.integers(0, 3) | st.integers(0, least * len(prompts)))


@given(drawn_requests(), st.integers(1, 4), st.integers(0, 3))
def test_answers_equal_those_of_each_prompt_alone(drawn: Any, together: int, seed: int) -> None:
    prompts, new_tokens, page_size, num_pages = drawn
    pool = {"num_pages": num_pages, "page_size": page_size, "seed": seed, "new_tokens": new_tokens}
    streamed = [list[int]() for _ in prompts]
    ended: list[int] = []

    def on_token(number: int, token: int, last: bool) -> None:
        assert number not in ended
        streamed[number].append(token)
        if last:
            ended.append(number)

    actual, forward = serve_all(prompts, together=together, **pool, on_token=on_token)
    assert actual.answers == [Tiny(seed).answer(prompt, new_tokens) for prompt in prompts]
    answer_alone = [serve_all([prompt], together=1, **pool)[0].answers[0] for prompt in prompts]
    assert actual.answers == answer_alone
    assert sorted(ended) == list(range(len(prompts)))
    for tokens, answer, leads in zip(streamed, actual.answers, actual.leads):
        assert tokens in (answer, [*answer, STOP]) and len(leads) == len(tokens)
    assert actual.largest_batch == max(forward.batches) <= together
    assert actual.waste[0] < page_size * actual.waste[1]
    assert 0 <= actual.matched_tokens < actual.prompt_tokens == sum(map(len, prompts))
    assert actual.most_used <= num_pages


def test_the_tiny_model_gives_different_answers_of_different_lengths() -> None:
    """Otherwise the tests above would show little: answers must stop early, reach the limit, and differ."""
    random = np.random.default_rng(0)
    answers = [Tiny().answer(random.integers(0, VOCABULARY, 5).tolist(), 6) for _ in range(60)]
    lengths = {len(answer) for answer in answers}
    assert {0, 6} < lengths and len({tuple(answer) for answer in answers}) > 30


# Scheduling


def prompts_of(*lengths: int) -> list[list[int]]:
    """Prompts that differ from their first token on."""
    return [[number + 1, *([3] * (length - 1))] for number, length in enumerate(lengths)]


def test_requests_wait_for_pages() -> None:
    requested = {"page_size": 4, "new_tokens": 4, "together": 8}
    _, plenty = serve_all(prompts_of(5, 5, 5, 5), num_pages=14, **requested)
    _, tight = serve_all(prompts_of(5, 5, 5, 5), num_pages=5, **requested)
    assert plenty.batches[0] == 4  # two pages each, and one more for each of the others
    assert tight.batches[0] == 2 and len(tight.batches) > len(plenty.batches)


def test_a_finished_request_makes_room_for_the_next() -> None:
    prompts = prompts_of(3, 3, 3)
    model = Tiny()
    lengths = [len(model.answer(prompt, 6)) for prompt in prompts]
    _, forward = serve_all(prompts, num_pages=99, page_size=4, new_tokens=6, together=2)
    assert forward.batches[0] == 2
    assert len(forward.batches) < sum(min(length + 1, 6) for length in lengths)


def test_requests_start_in_order_of_arrival() -> None:
    """Short prompts behind a long prompt that must wait do not overtake it."""
    _, forward = serve_all(prompts_of(9, 17, 2, 2), num_pages=7, page_size=4, new_tokens=2, together=4)
    assert forward.batches[0] == 1


@pytest.mark.parametrize("page_size", [1, 3, 4, 8])
def test_a_shared_prefix_is_computed_once(page_size: int) -> None:
    prefix = [5, 3, 7, 1, 9, 2, 4, 8]
    prompts = [[*prefix, last] for last in range(1, 7)]
    actual, forward = serve_all(prompts, num_pages=99, page_size=page_size, new_tokens=3, together=6)
    assert actual.shared >= 8 // page_size
    # The first one computes the prefix; the others find it, but for what is in no full page.
    assert forward.batches[0] == 1 and forward.batches[1] in (5, 6), "the first answer may be one token"
    assert actual.matched_tokens == 5 * (8 // page_size * page_size)
    assert actual.answers == [Tiny().answer(prompt, 3) for prompt in prompts]


def test_a_prefix_is_found_after_its_request_has_ended() -> None:
    prompts = [[5, 3, 7, 1, 9, 2, 4, 8, 1], [1, 2], [5, 3, 7, 1, 9, 2, 4, 8, 6]]
    actual, _ = serve_all(prompts, num_pages=9, page_size=4, new_tokens=3, together=1)
    assert actual.matched_tokens == 8 and actual.shared == 0
    assert actual.answers == [Tiny().answer(prompt, 3) for prompt in prompts]


def talkative(prompts: list[list[int]]) -> tuple[int, list[list[int]]]:
    """A seed of the model whose answers to all prompts are long, and these answers."""
    answers = {seed: [Tiny(seed).answer(prompt, 12) for prompt in prompts] for seed in range(40)}
    return next((seed, each) for seed, each in answers.items() if min(map(len, each)) > 6)


def test_a_request_that_shares_no_page_goes_to_host_memory_and_returns() -> None:
    """All four prompts fit, but not their answers."""
    prompts = prompts_of(4, 4, 4, 4)
    seed, answers = talkative(prompts)
    actual, _ = serve_all(prompts, num_pages=8, page_size=4, new_tokens=12, together=4, seed=seed)
    assert actual.swapped and not actual.dropped and actual.answers == answers
    assert 0 not in actual.swapped, "the oldest one goes on"


def test_requests_that_share_pages_start_again_and_find_them() -> None:
    prompts = [[1, 2, 3, 4, last] for last in (5, 6, 7, 8)]
    seed, answers = talkative(prompts)
    actual, forward = serve_all(prompts, num_pages=8, page_size=4, new_tokens=12, together=4, seed=seed)
    assert actual.dropped and actual.answers == answers
    # Each time one starts again, it finds the page that all share, which another one still has.
    assert forward.cache.allocator.prefix_report().hits >= 3 + len(actual.dropped)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prompt_that_begins_another_prompt(page_size: int) -> None:
    prompts = [[5, 3, 7, 1, 9], [5, 3, 7, 1, 9], [5, 3, 7], [5, 3, 7, 1, 9, 2, 2]]
    least = pages_for(prompts, 2, page_size)
    for num_pages in range(least, least + 9):
        actual, _ = serve_all(prompts, num_pages=num_pages, page_size=page_size, new_tokens=2, together=4)
        assert actual.answers == [Tiny().answer(prompt, 2) for prompt in prompts]


def test_a_pool_with_pages_in_use_by_others() -> None:
    forward = Watched(Tiny(), 8, 4)
    forward.cache.add("somebody else")
    forward.cache.step(["somebody else"], [11])
    prompts = prompts_of(5, 5, 5)
    actual = serve(forward, forward.cache, prompts, new_tokens=4, stop=STOP, together=8)
    assert actual.answers == [Tiny().answer(prompt, 4) for prompt in prompts]
    assert max(forward.batches) == 2  # five pages are free, and each request needs two
    assert forward.cache.allocator.sequences == ("somebody else",)


def test_no_requests_give_no_answers() -> None:
    actual, forward = serve_all([], num_pages=1, page_size=1, new_tokens=1, together=1)
    assert actual.answers == [] and not forward.batches


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"new_tokens": 0}, ValueError, "^new_tokens=0: expected 1 or more"),
        ({"together": 0}, ValueError, "^together=0: expected 1 or more"),
        ({"prompts": [[1], []]}, ValueError, r"^prompts\[1\]: expected at least one token"),
        (
            {"prompts": [[1], [1] * 12]},
            PoolFullError,
            r"^prompts\[1\]: 12 tokens and an answer of up to 2 need 4 pages",
        ),
    ],
)
def test_impossible_requests_are_refused_before_the_first_step(
    changed: Any, error: type[Exception], words: str
) -> None:
    requested = {"prompts": [[1], [2]], "new_tokens": 2, "together": 2, **changed}
    forward = Watched(Tiny(), 3, 4)
    with pytest.raises(error, match=words):
        serve(forward, forward.cache, requested.pop("prompts"), stop=STOP, **requested)
    assert not forward.batches and len(forward.cache.allocator) == 0


def test_the_reported_waste_is_the_largest_per_sequence() -> None:
    result, allocator = engine.Served([]), PageAllocator(9, 4)
    for name in range(3):
        allocator.allocate(name, 4)
    allocator.allocate("last", 1)
    engine._note(result, allocator, [])
    assert result.waste == (3, 4)
    for name in range(3):
        allocator.free(name)
    engine._note(result, allocator, [])
    assert result.waste == (3, 1)


# A real architecture


@pytest.mark.slow
def test_a_transformers_llama_serves_the_answers_it_gives_alone() -> None:
    pytest.importorskip("transformers")
    from examples.serving.torch_side import TorchForward, sizes_of

    model = tiny_llama("eager")
    prompts = [[5, 17, 3], [5, 17, 11], [5, 17, 2, 29, 31, 7, 13, 23, 19], [5, 17, 3, 3], [5, 17, 40]]
    expected = [answer_alone(model, prompt, 5) for prompt in prompts]
    sizes = sizes_of(model.config)
    assert sizes == {"num_layers": 2, "kv_heads": 1, "head_dim": 16}
    memory = 11 * 3 * 256 + 100  # a token needs 2 layers x 2 x 16 channels x 4 bytes
    num_pages = pages_that_fit(memory, page_size=3, **sizes)
    forward = TorchForward(model, num_pages=num_pages, page_size=3)
    assert sum(pool.nbytes for pool in (*forward.cache.k_pages, *forward.cache.v_pages)) == memory - 100
    actual = serve(forward, forward.cache, prompts, new_tokens=5, stop=1, together=3)
    assert min(min(leads) for leads in actual.leads) > 1e-3, "a lead this small could be noise: choose another seed"
    assert actual.answers == expected
    assert actual.largest_batch > 1 and forward.cache.allocator.report().free == 11


def answer_alone(model: Any, prompt: list[int], new_tokens: int) -> list[int]:
    """Greedy generation by transformers' own attention, which reads everything again for each token."""
    tokens = list(prompt)
    for _ in range(new_tokens):
        with torch.inference_mode():
            token = int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        if token == 1:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


# What it prints


class Spelled:
    """A tokenizer whose tokens are letters; two tokens of 7 are one character."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        text = "".join("7" if token == 7 else "abcdefgh[]"[token] for token in tokens if token < 10)
        return text.replace("77", "é").replace("7", "\ufffd")


def test_a_stream_prints_whole_characters_and_every_letter_once() -> None:
    lines: list[str] = []
    stream = Stream(Spelled(), lines.append, lambda: lines.append("ended"))
    for at, token in enumerate([0, 1, 2, 3, 8, 0, 9, 7, 7, 1]):
        stream.on_token(4, token, False)
        stream.on_token(5, at % 3, at == 9)
    stream.on_token(4, 10, True)
    printed = "".join(line.split("[/] ", 1)[1].replace(" [dim]end[/]", "") for line in lines if "[bold] 4" in line)
    assert stream.texts[4] == "abcd[a]éb" and printed.replace("\\", "") == stream.texts[4]
    assert lines.count("ended") == 2 and stream.texts[5] == "abcabcabca"


@pytest.mark.parametrize(
    ("alone", "lead", "left", "fails"),
    [
        ([1, 2, 3], 1.0, 0, False),
        ([1, 5, 3], 1.0, 0, True),
        ([1, 5, 3], 0.05, 0, False),  # rounding can turn so small a lead
        ([1, 2], 1.0, 0, True),
        ([1, 2, 3], 1.0, 3, True),
    ],
)
def test_the_example_fails_for_other_tokens_and_lost_pages(alone: Any, lead: float, left: int, fails: bool) -> None:
    allocator, console = PageAllocator(9, 4), Console(file=StringIO(), width=200)
    allocator.allocate("left", left)
    served = engine.Served([[1, 2, 3]], [[1.0, lead, lead, 1.0]], steps=4, prompt_tokens=8, matched_tokens=4)
    run = report.Run(["Why [x]?"], {0: "Because."}, served, 2.0, "bfloat16", 23040, allocator)
    other = report.Alone([0], [engine.Served([alone], [[1.0]])])
    assert report.show(console, run, other, 1.0) == int(fails)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("Why [x]?", "2.0 (4 tokens", "23040 (bfloat16)", "50% of the prompts' tokens (4 of 8)"):
        assert words in text
