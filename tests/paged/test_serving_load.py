"""Tests a server under load: requests that arrive, are cancelled and are preempted at random get the answers that they
get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from serving_load import Model, Server, drawn, faults

from attn_core import PageAllocator
from torch_frontend import PagedKVCache


@torch.inference_mode()
def served(count: int, seed: int = 0) -> tuple[Server, list[Any]]:
    requests, server = drawn(count, seed), Server(Model())
    server.serve(requests)
    return server, requests


def test_answers_under_load_equal_those_of_each_request_alone() -> None:
    server, requests = served(400)
    assert faults(server, requests) == []
    for event in ("cancelled while waiting", "cancelled while running", "preempted", "forked"):
        assert server.counts[event] >= 3, (event, server.counts)
    assert server.counts["largest batch"] > 4
    assert len({tuple(answer) for _, answer in server.answers}) > 200, "answers that are alike would show little"


def no_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedKVCache, "_copy", lambda self, copies: None)


def no_release(patch: pytest.MonkeyPatch) -> None:
    original = PageAllocator._release
    calls = iter(range(10**9))
    # Every hundredth page is lost.
    patch.setattr(PageAllocator, "_release", lambda self, page: next(calls) % 100 != 50 and original(self, page))


def no_update_of_new_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedKVCache, "update", lambda self, layer, k, v, step: None)


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "shared pages are not copied": (no_copies, "and alone ["),
    "pages are lost": (no_release, "pages are free"),
    "keys are not written": (no_update_of_new_keys, "and alone ["),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, words = FAULTS[fault]
    plant(monkeypatch)
    server, requests = served(60)
    assert any(words in sentence for sentence in faults(server, requests))


def test_missing_and_repeated_answers_are_found() -> None:
    server, requests = served(40)
    number, answer = server.answers.pop()
    assert f"request {number} has no answer" in faults(server, requests)
    server.answers += [(number, answer)] * 2
    assert faults(server, requests) == [f"request {number} was answered 2 times"]
