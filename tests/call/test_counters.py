"""Tests ``attn_core.counters``: what they count, in which form, and that no count is lost between threads."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework, empty_plan_caches

import attn_core
import torch_frontend
from attn_core import AttentionSpec, Target
from attn_core.backends.flex import program
from attn_core.backends.shared import first_calls, triton
from attn_core.call import observe
from attn_core.call.observe import Counters
from attn_core.context_parallel.call import build_call
from jax_frontend.bridge import compiled_lane
from torch_frontend.dispatch import prepared

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    empty_plan_caches()
    attn_core.counters(reset=True)
    yield
    empty_plan_caches()


def call(framework: Framework, length: int = 5, **options: Any) -> None:
    q = framework.array(np.ones((2, length, 4, 8), np.float32))
    framework.frontend.attention(q, q, q, **options)


def test_a_snapshot_has_the_documented_form() -> None:
    before = attn_core.counters()
    assert set(before) == set(Counters.__annotations__)
    assert json.loads(json.dumps(before)) == before
    assert before["plans"] == {"torch": {}, "jax": {}} and before["plan_hits"] == {"torch": 0, "jax": 0}
    assert set(before["fallbacks"]) == set(observe.FALLBACKS) and set(before["copies"]) == set(observe.COPIES)
    assert before["compiles"] == {kind: {"number": 0, "seconds": 0.0} for kind in observe.COMPILES}
    call(BOTH[0])
    assert before["plans"]["torch"] == {}, "a snapshot does not change"


@everywhere
def test_new_plans_count_by_framework_and_backend(framework: Framework) -> None:
    for length in (5, 6, 5, 6):
        call(framework, length, backend="math")
    counted = attn_core.counters()
    assert counted["plans"][framework.name] == {"math": 2}
    assert counted["plans"][framework.other.name] == {}
    assert counted["plan_hits"][framework.name] >= 2


def test_each_kind_of_tile_of_context_parallelism_counts() -> None:
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
    spec = AttentionSpec(batch=3, q_len=64, kv_len=64, causal=True, **sizes)
    for _ in range(2):
        call = build_call(spec, None, "ring", "contiguous", (4,), 1, Target("torch", "cpu"), ("math",))
    assert attn_core.counters()["plans"]["torch"] == {"math": len(call.backends)} and len(call.backends) > 1


def test_a_call_of_new_lengths_alone_counts_as_a_plan() -> None:
    for length in range(5, 15):
        call(BOTH[0], length)
    assert attn_core.counters()["plans"]["torch"] == {"sdpa_flash": 10}


def test_fallbacks_and_callbacks_count() -> None:
    compiled_lane.lane_of.cache_clear()
    call(BOTH[0], softcap=9.0)
    call(BOTH[1], length=13, backend="math")
    counted = attn_core.counters()
    assert counted["fallbacks"] == {"backend": 1, "lane": 1, "triton": 0}
    assert counted["callback_calls"] == 1
    assert counted["compiles"]["xla"]["number"] == 1 and counted["compiles"]["xla"]["seconds"] > 0


def test_copies_count() -> None:
    q = torch.randn(2, 5, 4, 8)
    mask, bias = torch.rand(1, 1, 5, 5) > 0.1, torch.randn(1, 4, 5, 5, dtype=torch.bfloat16)
    for _ in range(3):
        torch_frontend.attention(q, q, q, mask=mask)
        torch_frontend.attention(q, q, q, bias=bias)
        torch_frontend.attention(q.transpose(2, 3).contiguous().transpose(2, 3), q, q, causal=True)
    assert attn_core.counters()["copies"] == {"mask": 3, "bias": 3, "operand": 3}


def test_evictions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    small = lru_cache(maxsize=2, typed=True)(prepared._prepared.__wrapped__)
    monkeypatch.setattr(prepared, "_prepared", small)
    for length in (5, 6, 7, 8):
        torch_frontend.attention(*[torch.zeros(1, length, 2, 8)] * 3)
    assert attn_core.counters()["evictions"] == {"prepared": 2}


def test_reset_starts_from_zero() -> None:
    call(BOTH[0])
    call(BOTH[0])
    assert attn_core.counters(reset=True)["plans"]["torch"] == {"sdpa_flash": 1}
    again = attn_core.counters()
    assert again["plans"]["torch"] == {} and again["plan_hits"]["torch"] == 0
    call(BOTH[0])
    assert attn_core.counters()["plan_hits"]["torch"] == 1


def test_no_count_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, each = 8, 4000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    start = Barrier(threads)

    def work(_: int) -> None:
        start.wait()
        for _ in range(each):
            observe.count("plan", "torch", "stand_in")
            observe.compiled("triton", "a kernel", 0.5)
            observe.mask_converted()

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        sys.setswitchinterval(interval)
    counted = attn_core.counters()
    assert counted["plans"]["torch"]["stand_in"] == threads * each
    assert counted["compiles"]["triton"] == {"number": threads * each, "seconds": threads * each * 0.5}
    assert counted["copies"]["mask"] == threads * each


def test_snapshots_beside_calls_in_eight_threads_are_whole() -> None:
    q = torch.randn(1, 3, 2, 8)
    lengths = [range(first, first + 40) for first in range(5, 5 + 8 * 40, 40)]

    def work(own: range) -> None:
        for length in own:
            k = torch.randn(1, length, 2, 8)
            torch_frontend.attention(q, k, k)
            attn_core.counters()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, lengths))
    assert sum(attn_core.counters()["plans"]["torch"].values()) == 8 * 40


def test_a_compiled_function_stays_one_graph_and_counts() -> None:
    torch._dynamo.reset()
    q = torch.randn(2, 9, 4, 8)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
    compiled = torch.compile(lambda q: torch_frontend.attention(q, q, q, mask=mask), fullgraph=True, backend="eager")
    with attn_core.log(True):
        torch.testing.assert_close(compiled(q), torch_frontend.attention(q, q, q, mask=mask))
    assert sum(attn_core.counters()["plans"]["torch"].values()) >= 1


def test_compilations_of_kernels_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for key in ("a", "b", "a"):
        first_calls.run("flash4", ("test_counters", key), lambda: None, lambda: "the call of a test")
    monkeypatch.setattr(program, "inductor", lambda graph, examples: graph)
    program.Compiler("flex_of_a_test")(None, None)
    code = type("Compiled", (), {"__getitem__": lambda self, grid: None})()
    kernel = type("Kernel", (), {"__getitem__": lambda self, grid: lambda *_, **__: code, "params": ()})()
    monkeypatch.setattr(triton, "_launches_directly", lambda: False)
    for _ in range(2):
        triton._launch_compiled(kernel, (1, 1, 1), (), (), SimpleNamespace().__dict__)
    counted = attn_core.counters()["compiles"]
    assert {kind: entry["number"] for kind, entry in counted.items()} == {
        "flash4": 2,
        "ffpa": 0,
        "flex": 1,
        "triton": 1,
        "compiled_lane": 0,
        "xla": 0,
    }


def test_the_page_names_every_key_and_event() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how_to/observe.md").read_text(encoding="utf-8")
    names = {*Counters.__annotations__, *observe.COMPILES, *observe.COPIES, *observe.EVENTS}
    assert not {name for name in names if f"`{name}`" not in page}
    assert not {what for what in observe.FALLBACKS if f'"{what}"' not in page}
