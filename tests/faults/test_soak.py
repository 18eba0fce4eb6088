"""Tests the soak: every cache has a bound, a short run leaves nothing behind, and the verdict finds planted leaks."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
import caches
import soak
import torch
from soak_calls import EagerCalls

from attn_core.backends.flash4 import replay
from attn_core.backends.shared import first_calls, triton

CALLS, BLOCKS, POINTS = 2000, 6, 40
"""A run of some seconds that draws the same few blocks of calls again and again, so that caches fill at once."""


# Caches


def test_every_cache_states_its_bound() -> None:
    found = caches.all_caches()
    assert len(found) > 150
    assert [cache.key for cache in found if cache.bound is None] == []


def test_every_stated_bound_belongs_to_a_cache() -> None:
    assert set(caches.BOUNDS) <= {cache.key for cache in caches.all_caches()}


def test_stated_bounds_are_those_of_the_code() -> None:
    expected = {
        "attn_core.backends.flash4.replay:_seen": replay.MOST_CALLS,
        "attn_core.backends.flash4.replay:_recorded": 2 * replay.MOST_CALLS,
        "attn_core.backends.shared.first_calls:_compiled": first_calls.MOST_KEYS,
        "attn_core.backends.shared.triton:_launches": triton.MOST_LAUNCHES,
    }
    assert {key: caches.BOUNDS[key] for key in expected} == expected


PLANTED = {
    "a function under cache": ("@cache\ndef f(x): ...", "f"),
    "a function under lru_cache without a limit": ("@lru_cache(maxsize=None)\ndef f(x): ...", "f"),
    "a method": ("class C:\n    @cached_once\n    def f(self): ...", "C.f"),
    "a function in a function": ("def g():\n    @cache\n    def f(x): ...", "f"),
    "a cache made by a call": ("def g(function):\n    f = cache(function)", "f"),
    "a dict": ("f: dict[int, int] = {}", "f"),
    "a typed set": ("f = set[int]()", "f"),
    "a list": ("f = []", "f"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_cache_without_a_bound_is_found(planted: str) -> None:
    source, name = PLANTED[planted]
    assert list(caches.caches_of(source, "module")) == [caches.Cache("module", name, None)]


def test_limits_are_read_from_the_sources() -> None:
    source = "MOST = 7\n@lru_cache(maxsize=64, typed=True)\ndef f(x): ...\ng = lru_cache(maxsize=MOST)(f)\nh = {1: 2}"
    assert [(cache.name, cache.bound) for cache in caches.caches_of(source, "module")] == [("f", 64), ("g", 7)]


def test_a_full_cache_is_reported() -> None:
    key = "torch_frontend.dispatch.plan:plan"
    assert caches.over_bound({key: 4096}) == []
    assert caches.over_bound({key: 4097}) == [f"{key} has 4097 entries, and its bound is 4096"]


# Short runs


class Leaking(EagerCalls):
    """Calls of which each leaves something behind."""

    def __init__(self, leak: Callable[[Any], None] | None = None, **more: Any) -> None:
        super().__init__("cpu", repeat=BLOCKS, **more)
        self.leak = leak

    def run(self, kind: str) -> Any:
        result = super().run(kind)
        if self.leak is not None:
            self.leak(result)
        return result


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def short_run(leak: Callable[[Any], None] | None = None, calls: int = CALLS, **more: Any) -> dict[str, Any]:
    return soak.soak(Leaking(leak, **more), soak.Budget(calls, None), points=POINTS)


@pytest.fixture(scope="module")
def clean() -> dict[str, Any]:
    short_run(calls=600)  # a first run fills the caches of everything that Python and torch do only once
    return short_run()


@pytest.mark.slow
def test_a_short_run_leaves_nothing_behind(clean: dict[str, Any]) -> None:
    assert clean["calls"] >= CALLS and len(clean["points"]) == POINTS
    assert soak.faults(clean, times=False) == []


def test_a_short_run_makes_every_kind_of_call() -> None:
    calls = EagerCalls("cpu")
    kinds = set(calls.block)
    assert {"plain", "options", "packed", "training", "pages", "refusal"} <= kinds
    for kind in kinds:
        assert calls.run(kind) is not None, kind
    assert len(EagerCalls("cpu", kinds=("plain",)).block) == 3


def test_calls_never_repeat_in_a_long_run() -> None:
    calls = EagerCalls("cpu", kinds=("plain",))
    shapes = [tuple(calls.run("plain").shape) for _ in range(200)]
    assert len(set(shapes)) > 190
    again = EagerCalls("cpu", repeat=2)
    drawn = []
    for number in range(4):
        again.begin(number)
        drawn.append(again.random.random())
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


kept: list[Any] = []
unbounded: dict[int, str] = {}
open_ends: list[int] = []
never = threading.Event()


def every(number: int, leak: Callable[[], Any]) -> Callable[[Any], None]:
    """A leak in one call of ``number``."""
    counts = iter(range(10**9))
    return lambda _: leak() if next(counts) % number == 0 else None


def start_thread() -> None:
    threading.Thread(target=never.wait, daemon=True).start()


LEAKS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a list that keeps outputs": (lambda result: kept.append(result), "Python's memory grows by "),
    "an unbounded cache": (lambda _: unbounded.setdefault(len(unbounded), str(len(unbounded))), "Python's memory "),
    "bytes of one object": (lambda _: kept.append(bytearray(2**16)), "resident memory grows by "),
    "an open file": (every(100, lambda: open_ends.extend(os.pipe())), "descriptors: "),
    "a thread that never ends": (every(300, start_thread), "threads: "),
    "a handler of a logger": (
        every(300, lambda: logging.getLogger("attn_core").addHandler(logging.NullHandler())),
        "handlers: logging: ",
    ),
}


@pytest.fixture
def afterwards() -> Iterator[None]:
    never.clear()
    yield
    kept.clear(), unbounded.clear(), never.set()
    for end in open_ends:
        os.close(end)
    open_ends.clear()
    logging.getLogger("attn_core").handlers.clear()


@pytest.mark.sampled
@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(leak: str, afterwards: None) -> None:
    function, sentence = LEAKS[leak]
    actual = soak.faults(short_run(function, kinds=("plain", "options", "packed")), times=False)
    assert any(each.startswith(sentence) for each in actual), actual


# The verdict


def run_of(**changes: Callable[[int], Any]) -> dict[str, Any]:
    """A run of 100 points, flat but for the changes: name -> value at a point."""
    flat: dict[str, Any] = {"calls": lambda at: 10_000 * (at + 1), "ratio": lambda at: 1.0, "settled": lambda at: True}
    flat |= {name: lambda at: 10**9 for name in ("resident", "blocks", "allocated")}
    flat |= {name: lambda at: 7 for name in ("descriptors", "threads", "programs")}
    flat |= {name: lambda at: {"thing": 5} for name in ("handlers", "caches", "device")}
    return {"points": [{name: value(at) for name, value in (flat | changes).items()} for at in range(100)]}


def test_a_flat_run_has_no_faults() -> None:
    assert soak.faults(run_of()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"resident": lambda at: 10**9 + 10_000 * 30 * at}, "^resident memory grows by 30.0 bytes per call"),
        ({"blocks": lambda at: 10**6 + 1000 * at}, "^Python's memory grows by 0.100 blocks per call"),
        ({"descriptors": lambda at: 7 + at // 50}, "^descriptors: 7 in the first half, 8 in the last"),
        ({"threads": lambda at: 7 + at // 90}, "^threads: 7 in the first half, 8 in the last"),
        ({"handlers": lambda at: {"thing": 5 + at // 60}}, "^handlers: thing: 5 in the first half, 6 in the last"),
        (
            {"device": lambda at: {"torch allocated": 10 * at}},
            "^torch allocated: at most 490 in the first half, 990",
        ),
        ({"ratio": lambda at: 1 + at / 900}, "^a call of the last tenth takes 1.1.. times as long as one of the first"),
        (
            {"caches": lambda at: {"torch_frontend.dispatch.plan:plan": 4097}},
            "^torch_frontend.dispatch.plan:plan has 4097 entries, and its bound is 4096",
        ),
    ],
)
def test_growth_is_a_fault(changes: Any, words: str) -> None:
    (sentence,) = soak.faults(run_of(**changes))
    assert re.match(words, sentence), sentence


def test_memory_that_comes_and_goes_is_no_fault() -> None:
    run = run_of(resident=lambda at: 10**9 + 2**21 * (at % 3), ratio=lambda at: 1.0 + 0.3 * (at % 2))
    assert soak.faults(run) == []


def test_only_settled_points_count_for_memory() -> None:
    run = run_of(settled=lambda at: at % 10 == 0, resident=lambda at: 10**9 + 10**7 * (at % 10))
    assert soak.faults(run) == []
