"""Tests ``SlowPathWarning``: planted slow loops warn once, and usual loops never."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework, empty_plan_caches

import attn_core
import jax_frontend
from attn_core import SeqInfo, SlowPathWarning
from attn_core.backends.math import backend as math
from attn_core.call import counters, slow_copies, slow_paths
from attn_core.selection import choice, new_plans
from jax_frontend.bridge import compiled_lane, hot_callbacks, targets
from torch_frontend import attention

pytestmark = pytest.mark.sampled

PAGE = Path(__file__).resolve().parents[2] / slow_paths.PAGE
MANY = slow_copies.EVERY + slow_copies.FIRST + 1
"""Calls in a loop that certainly contains one that is looked at."""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No line has been warned of, and no call has been planned."""
    monkeypatch.setattr(slow_paths, "_warned", set())
    empty_plan_caches(programs=False)
    monkeypatch.setattr(new_plans, "_loops", {name: new_plans._Loop(name) for name in counters.FRAMEWORKS})
    yield
    empty_plan_caches(programs=False)


def found(run: Callable[[], Any]) -> list[warnings.WarningMessage]:
    """The SlowPathWarnings of a program."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        run()
    return [each for each in record if each.category is SlowPathWarning]


def rows(length: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(batch, length, 4, 8).to(dtype)


# Planted loops


def growing_cache() -> None:
    q = rows(1)
    for length in range(1, 300):
        k = rows(length)
        attention(q, k, k)


def new_documents() -> None:
    q = torch.randn(400, 4, 8)
    for longest in range(1, 300):
        attention(q, q, q, seq_info=SeqInfo.from_lengths([longest, 400 - longest]), causal=True)


def new_scales() -> None:
    q = rows(5)
    for number in range(1, 300):
        attention(q, q, q, scale=1 / number)


def new_lengths_in_jax() -> None:
    def trace(length: int) -> None:
        q = jax.ShapeDtypeStruct((2, length, 4, 8), jnp.float32)
        jax.eval_shape(lambda q: jax_frontend.attention(q, q, q, causal=True), q)

    for length in range(1, 200):
        trace(length)


def causal_mask() -> None:
    q, mask = rows(6), torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    for _ in range(2 * MANY):
        attention(q, q, q, mask=mask)


def causal_bias() -> None:
    q, bias = rows(6), torch.full((6, 6), -torch.inf).triu(1)[None, None]
    for _ in range(2 * MANY):
        attention(q, q, q, bias=bias)


def causal_mask_with_sinks() -> None:
    q, mask, sinks = rows(6), torch.ones(6, 6, dtype=torch.bool).tril()[None, None], torch.zeros(4)
    for _ in range(2 * MANY):
        attention(q, q, q, mask=mask, sinks=sinks)


def causal_mask_in_jax() -> None:
    q, mask = jnp.ones((1, 6, 4, 8)), jnp.tril(jnp.ones((6, 6), bool))[None, None]
    for _ in range(MANY):
        jax_frontend.attention(q, q, q, mask=mask)


def bias_of_another_dtype() -> None:
    q, bias = rows(6), torch.randn(1, 4, 6, 6).bfloat16()
    for _ in range(2 * MANY):
        attention(q, q, q, bias=bias)


PLANTED: list[tuple[Callable[[], None], str, str]] = [
    (
        growing_cache,
        "replans",
        r"torch: 64 of the last 6\d lookups made a new plan \(kv_len=\d+ after \d+\); decode from",
    ),
    (new_documents, "replans", r"max_len_q=\d+ after \d+.*round the longest document up"),
    (new_scales, "replans", r"scale=0\.\d+ after 0\.\d+\); keep scale fixed"),
    (new_lengths_in_jax, "replans", r"jax: 64 of the last \d+ lookups made a new plan \(q_len="),
    (causal_mask, "mask", r"mask: every call reads a table of 36 values that says the same as causal=True; pass"),
    (causal_bias, "mask", r"bias: every call reads a table of 36 values that says the same as causal=True; pass"),
    (causal_mask_with_sinks, "mask", r"the same as causal=True; pass causal=True instead of mask="),
    (causal_mask_in_jax, "mask", r"mask: .* the same as causal=True; pass"),
    (bias_of_another_dtype, "bias", r"the kernel adds float32 and the bias is bfloat16; pass it as float32"),
]


@pytest.mark.parametrize(("program", "cause", "text"), PLANTED, ids=[program.__name__ for program, *_ in PLANTED])
def test_a_slow_loop_warns_once(program: Callable[[], None], cause: str, text: str) -> None:
    before = attn_core.counters()["slow_paths"].get(cause, 0)
    (warning,) = found(program)
    assert re.search(text, str(warning.message)), warning.message
    assert warning.filename == __file__, "the line of the caller"
    assert str(warning.message).endswith(f"({slow_paths.PAGE}#{slow_paths.CAUSES[cause]})")
    assert attn_core.counters()["slow_paths"][cause] == before + 1


def test_a_second_line_warns_again() -> None:
    q, mask = rows(6), torch.ones(6, 6, dtype=torch.bool).tril()[None, None]

    def both() -> None:
        for _ in range(MANY):
            attention(q, q, q, mask=mask)
        for _ in range(MANY):
            attention(q, q, q, mask=mask)

    one, other = found(both)
    assert one.lineno != other.lineno


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_checks_find_such_a_mask_in_one_call(framework: Framework) -> None:
    def call() -> None:
        q = framework.zeros(1, 6, 4, 8)
        framework.frontend.attention(q, q, q, mask=framework.array(np.tril(np.ones((1, 1, 6, 6), bool))))

    assert not found(call)
    with attn_core.checks(True):
        (warning,) = found(call)
        assert not found(call)
    assert "the same as causal=True" in str(warning.message)


@pytest.mark.parametrize("runs", [hot_callbacks.HOT_RUNS + 5, hot_callbacks.HOT_RUNS - 1])
def test_a_call_that_just_misses_the_compiled_lane_warns_in_a_hot_loop(
    runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(math, "program", None, raising=False)
    monkeypatch.setattr(math, "program_refuses", lambda spec, device: ("sinks: added by torch",), raising=False)
    for cache in (compiled_lane.lane_of, choice._explained):
        cache.cache_clear()
    targets._callbacks.clear()
    q = jnp.ones((2, 17, 4, 8))
    step = jax.jit(lambda q: jax_frontend.attention(q, q, q, backend="math"))

    def loop() -> None:
        for _ in range(runs):
            step(q).block_until_ready()

    try:
        warned = found(loop)
    finally:
        compiled_lane.lane_of.cache_clear()
        targets._callbacks.clear()
    if runs < hot_callbacks.HOT_RUNS:
        assert not warned
    else:
        (warning,) = warned
        text = f"math forward ran {hot_callbacks.HOT_RUNS} times by callback, because sinks: added by torch"
        assert text in str(warning.message) and warning.filename == __file__


def test_the_warning_can_be_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        with pytest.raises(SlowPathWarning, match="kv_len"):
            growing_cache()


def test_a_cleared_cache_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cleared cache counts its hits from zero, so a program with many hits seems to have fewer than none."""
    hits = iter([500, 10, 12])  # at the end of each window
    monkeypatch.setattr(counters, "hits", lambda framework: next(hits))
    loop = new_plans._Loop("torch")
    sizes = {"batch": 1, "q_len": 5, "kv_len": 5, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "value_dim": 8}
    spec = attn_core.AttentionSpec(**sizes, dtype="float32")

    def steps() -> None:
        for _ in range(3 * new_plans.WINDOW):
            loop.step(spec)

    assert not found(steps)
    hits = iter([500, 501, 502])
    assert found(steps)


def test_threads_warn_of_one_line_once() -> None:
    def together() -> None:
        threads = [threading.Thread(target=causal_mask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(found(together)) == 1


# Loops that must not warn


def training() -> None:
    q = rows(12).requires_grad_()
    for _ in range(400):
        attention(q, q, q, causal=True).sum().backward()


def training_with_padding() -> None:
    q = rows(6).requires_grad_()
    for step in range(MANY):
        mask = torch.arange(6) < torch.tensor([[6], [1 + step % 6]])
        attention(q, q, q, mask=mask[:, None, None, :], causal=True).sum().backward()


def static_cache() -> None:
    q, cache = rows(1), rows(64)
    for step in range(MANY):
        attention(q, cache, cache, mask=(torch.arange(64) <= step % 64)[None, None, None])


def growing_cache_of_a_model() -> None:
    q = rows(1)
    for length in range(1, 300):
        k = rows(length)
        for _ in range(2):  # layers
            attention(q, k, k)


def buckets() -> None:
    for step in range(400):
        q = rows(8 * (1 + step % 20))
        attention(q, q, q, causal=True)


def documents_of_rounded_lengths() -> None:
    q = torch.randn(256, 4, 8)
    for step in range(300):
        first = 1 + step % 127
        offsets = torch.tensor([0, first, 256], dtype=torch.int32)
        attention(q, q, q, seq_info=SeqInfo(offsets, offsets, 256, 256), causal=True)


def a_start_with_many_shapes() -> None:
    for length in range(1, 100):
        q = rows(length)
        attention(q, q, q)
    for _ in range(300):
        attention(q, q, q)


def other_masks() -> None:
    q, mask = rows(6), torch.rand(1, 4, 6, 6) > 0.3
    bias = torch.randn(1, 4, 6, 6)
    for _ in range(MANY):
        attention(q, q, q, mask=mask)
        attention(q, q, q, bias=bias)


def a_trained_bias() -> None:
    q, bias = rows(6), torch.zeros(1, 4, 6, 6, requires_grad=True)
    for _ in range(MANY):
        attention(q, q, q, bias=bias).sum().backward()


def jitted_training() -> None:
    step = jax.jit(jax.grad(lambda q: jax_frontend.attention(q, q, q, causal=True).sum()))
    q = jnp.ones((2, 12, 4, 8))
    for _ in range(200):
        q = step(q)


def jitted_training_by_callback() -> None:
    step = jax.jit(jax.grad(lambda q: jax_frontend.attention(q, q, q, causal=True, backend="sdpa_flash").sum()))
    q = jnp.ones((2, 12, 4, 8))
    for _ in range(200):
        q = step(q)


def compiled_training() -> None:
    step = torch.compile(lambda q: attention(q, q, q, causal=True).sum(), fullgraph=True, backend="aot_eager")
    q = rows(12).requires_grad_()
    for _ in range(200):
        step(q).backward()


USUAL = (
    *(training, training_with_padding, static_cache, growing_cache_of_a_model, buckets, documents_of_rounded_lengths),
    *(a_start_with_many_shapes, other_masks, a_trained_bias, jitted_training, jitted_training_by_callback),
    compiled_training,
)


@pytest.mark.parametrize("program", USUAL, ids=[program.__name__ for program in USUAL])
def test_a_usual_loop_does_not_warn(program: Callable[[], None]) -> None:
    assert [str(each.message) for each in found(program)] == []


def test_every_warning_leads_to_a_heading_of_the_page() -> None:
    headings = [line[3:] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(slow_paths.CAUSES.values()) <= anchors
