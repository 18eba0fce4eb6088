"""Tests ``attn_core.log``: which events give a record, with which fields, and that nothing is written unasked."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from frameworks import BOTH, Framework, empty_plan_caches
from own_process import in_its_own_process

import attn_core
from attn_core.call import observe
from attn_core.selection import new_plans
from jax_frontend.bridge import compiled_lane

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    empty_plan_caches()
    with attn_core.log(False):
        yield
    empty_plan_caches()


def records_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of the records of an event, after a trip through JSON, which log pipelines make."""
    ours = [record for record in caplog.records if record.name == "attn_core"]
    return [json.loads(json.dumps(each.attn)) for each in ours if each.attn["event"] == event]  # type: ignore[attr-defined]


def call(framework: Framework, length: int = 5, **options: Any) -> None:
    q = framework.array(np.ones((2, length, 4, 8), np.float32))
    framework.frontend.attention(q, q, q, **options)


@everywhere
def test_a_new_call_gives_one_record_with_its_choice(framework: Framework, caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        call(framework, causal=True, backend="math")
        call(framework, causal=True, backend="math")
    (record,) = records_of(caplog, "plan")
    assert record == {
        "event": "plan",
        "backend": "math",
        "framework": framework.name,
        "device": "cpu",
        "call": "b2 q5 kv5 h4:4 d8 f32 causal",
        "chosen_by": "name",
        "predicted_us": None,
        "refused": {},
    }
    (line,) = [each for each in caplog.records if getattr(each, "attn", {}).get("event") == "plan"]
    assert line.getMessage() == f"plan: math in {framework.name} on cpu, by name: b2 q5 kv5 h4:4 d8 f32 causal"
    assert line.levelname == "INFO" and line.pathname == __file__


@everywhere
def test_automatic_choice_says_what_it_passed_over(framework: Framework, caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        call(framework, softcap=9.0)
    (record,) = records_of(caplog, "plan")
    assert record["chosen_by"] in ("static order", "cost model")
    for name, reasons in record["refused"].items():
        assert reasons and name != record["backend"]


def test_a_refusal_of_the_preferred_backend_is_a_fallback(caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        call(BOTH[0], softcap=9.0)
        call(BOTH[0], backend=("flash4", "math"))
        call(BOTH[0], causal=True)  # the preferred backend runs it
    automatic, named = records_of(caplog, "fallback")
    assert (automatic["what"], automatic["backend"]) == ("backend", "math")
    assert automatic["refused"] == {"sdpa_flash": ["softcap=9.0: the aten CPU flash kernel has none"]}
    assert list(named["refused"]) == ["flash4"]


def test_a_call_by_callback_says_what_the_compiled_lane_misses(caplog: pytest.LogCaptureFixture) -> None:
    compiled_lane.lane_of.cache_clear()
    with attn_core.log(True):
        call(BOTH[1], causal=True, backend="math")
    (record,) = records_of(caplog, "fallback")
    assert (record["what"], record["backend"], record["direction"]) == ("lane", "math", "forward")
    assert record["missing"] == "math hands out no compiled kernels"


def test_a_full_cache_gives_a_record(caplog: pytest.LogCaptureFixture) -> None:
    @lru_cache(maxsize=2)
    def small(number: int) -> None:
        new_plans.evicted(small)

    with attn_core.log(True):
        for number in (1, 2, 2, 3):
            small(number)
    assert records_of(caplog, "eviction") == [{"event": "eviction", "cache": "small", "size": 2}]


def test_a_compilation_gives_its_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        with observe.timed("triton", "a kernel"):
            pass
        with pytest.raises(RuntimeError), observe.timed("triton", "a broken kernel"):
            raise RuntimeError
    (record,) = records_of(caplog, "compile")
    assert (record["kind"], record["name"]) == ("triton", "a kernel") and 0 <= record["seconds"] < 5


def test_xla_compiles_of_eager_calls_are_seen(caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        call(BOTH[1], length=11, backend="jax_xla")
    (record,) = records_of(caplog, "compile")
    assert (record["kind"], record["name"]) == ("xla", "an eager call of attention") and record["seconds"] > 0


@everywhere
def test_nothing_is_written_unasked(framework: Framework, caplog: pytest.LogCaptureFixture) -> None:
    call(framework, softcap=9.0)
    assert [record for record in caplog.records if record.name == "attn_core"] == []


def test_levels_of_the_logger_apply(caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True), caplog.at_level(logging.WARNING, "attn_core"):
        call(BOTH[0], softcap=9.0)
    assert {record.levelname for record in caplog.records if record.name == "attn_core"} == {"WARNING"}


CALL = "import torch; from torch_frontend import attention; q = torch.ones(1, 4, 2, 8); attention(q, q, q); "


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("program", "value", "lines"),
    [
        (CALL, "1", ["attn_core plan: sdpa_flash in torch on cpu"]),
        (CALL, "0", []),
        (CALL, "", []),
        ("import logging; logging.basicConfig(format='%(levelname)s %(message)s'); " + CALL, "1", ["INFO plan: sdpa_"]),
        ("import logging; logging.disable(); " + CALL, "1", []),
    ],
    ids=["on", "off", "unset", "a handler of the program", "logging disabled"],
)
def test_the_environment_switches_records_on(program: str, value: str, lines: list[str]) -> None:
    done = in_its_own_process(program, ATTN_CORE_LOG=value, PYTHONWARNINGS="ignore")
    written = done.stderr.splitlines()
    assert done.returncode == 0 and len(written) == len(lines), done.stderr
    assert all(line.startswith(start) for line, start in zip(written, lines, strict=True))
