"""Tests the order of automatic choice: how it is derived from times, and which measured case a call is compared
with."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attn_core import backends
from attn_core.call import masks
from attn_core.call.arithmetic import flops, pairs
from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference
from attn_core.selection.preference import Case, Features, cases_of, features, measured, nearest, order, ranking, sizes
from attn_core.selection.random_calls import LIMITS, random_call, random_calls
from attn_core.selection.regret import regrets, right_times, summary
from attn_core.selection.sweep import QUICK, plain_fields, spec_of
from benchmarks.sweep_preference import derive, stable_order

ROOT = Path(__file__).resolve().parents[2]
SPEC = AttentionSpec(
    batch=4,
    q_len=4096,
    kv_len=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    dtype="bfloat16",
    causal=True,
)
USUAL = ("flash3", "flash4", "sdpa_cudnn", "flash2", "flex", "math")


@pytest.fixture(autouse=True)
def usual_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order without measurements, so that new measurements do not change the tests."""
    monkeypatch.setattr(
        backends,
        "PREFERENCE",
        {
            ("torch", "cuda"): USUAL,
            ("jax", "cuda"): (*USUAL[:-1], "jax_cudnn", "jax_xla", "math"),
            ("torch", "cpu"): (),
        },
    )


def record(name: str, spec: AttentionSpec, times: dict[str, Any], direction: str = "forward") -> dict[str, Any]:
    """A raw record: a time in µs for each backend, or a whole entry."""
    entries = {
        backend: time if isinstance(time, dict) else {"median": time, "microseconds": [time], "difference": 0.0}
        for backend, time in times.items()
    }
    return {"name": name, "direction": direction, "spec": plain_fields(spec), "lengths": None, "backends": entries}


def raw_of(*records: dict[str, Any]) -> dict[str, Any]:
    head = {"date": "a day", "device": "sm90", "device_name": "a GPU", "framework": "torch", "versions": {"torch": "2"}}
    return head | {"cases": list(records)}


LONG = record("long", SPEC, {"flash3": 100.0, "flash4": 110.0, "sdpa_cudnn": 130.0, "flash2": 210.0, "math": 9000.0})
SHORT = record("short", replace(SPEC, q_len=128, kv_len=128), {"flash3": 50.0, "sdpa_cudnn": 20.0, "flash2": 30.0})
CAPPED = record(
    "capped", replace(SPEC, softcap=50.0), {"flash3": {"refused": ["no"]}, "flash4": 140.0, "flash2": 250.0}
)
TRAINED = record("long", SPEC, {"flash4": 380.0, "flash3": {"refused": ["no"]}, "sdpa_cudnn": 350.0}, "training")
RAW = raw_of(LONG, SHORT, CAPPED, TRAINED)
CASES = cases_of(json.loads(json.dumps(derive(RAW))))  # as it is read back from a file


@pytest.fixture
def measured_gpu() -> Iterator[None]:
    """The table of sm90 is CASES, and no other device was measured."""
    with measured_on_sm90(CASES):
        yield


@contextmanager
def measured_on_sm90(cases: tuple[Case, ...]) -> Iterator[None]:
    """Replaces every measured table; choice must neither read what it cached before nor leave anything behind."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(preference, "measured", lambda device: cases if device == "sm90" else ())
        preference._alike_on.cache_clear()
        yield
    preference._alike_on.cache_clear()


# Deriving a table


def test_a_table_names_its_source_and_the_fast_backends() -> None:
    table = derive(RAW)
    assert {name: table[name] for name in ("date", "device", "device_name", "framework", "versions")} == {
        name: RAW[name] for name in ("date", "device", "device_name", "framework", "versions")
    }
    assert [case["name"] for case in table["cases"]] == ["long", "short", "capped", "long"]
    assert table["cases"][0]["times"] == {"flash3": 1.0, "flash4": 1.1, "sdpa_cudnn": 1.3, "flash2": 2.1, "math": 90.0}
    assert table["cases"][0]["features"]["band"] == "causal"
    assert [case["features"]["training"] for case in table["cases"]] == [False, False, False, True]
    assert list(table["cases"][3]["times"]) == ["sdpa_cudnn", "flash4"]


def test_times_within_two_per_cent_keep_the_usual_order() -> None:
    near = {"math": 1.0, "flash2": 1.01, "flash3": 1.019, "flash4": 1.03, "sdpa_cudnn": 1.05}
    assert stable_order(near, USUAL) == ["flash3", "flash2", "math", "flash4", "sdpa_cudnn"]
    assert stable_order({"a_new_one": 1.0, "math": 1.001}, USUAL) == ["math", "a_new_one"]
    for seed in range(50):  # for any times: the next backend is never more than a tie slower than the best of the rest
        times = {name: random.Random(f"{seed}{name}").uniform(1, 1.1) for name in USUAL}
        actual = stable_order(times, USUAL)
        assert sorted(actual) == sorted(USUAL)
        for place, name in enumerate(actual):
            assert times[name] <= 1.02 * min(times[later] for later in actual[place:])
        assert stable_order(dict(reversed(times.items())), USUAL) == actual


def test_times_of_wrong_results_do_not_count() -> None:
    off, nan, died = ({"median": 1.0, "difference": gap} for gap in (0.5, math.nan, 0.0))
    actual = derive(
        raw_of(
            record("x", SPEC, {"flash3": 9.0, "flash2": off, "flex": nan, "math": 30.0, "flash4": {"failed": "died"}})
        )
    )
    assert list(actual["cases"][0]["times"]) == ["flash3", "math"]
    assert actual["cases"][0]["failed"] == ["flash2", "flex", "flash4"]
    assert right_times(record("x", SPEC, {"math": died})) == {"math": 1.0}
    assert (
        derive(raw_of(record("x", SPEC, {"flash3": 9.0, "flash2": off, "flex": off})))["cases"] == []
    )  # no result is known to be right
    assert derive(raw_of(record("x", SPEC, {"flash3": {"refused": ["no"]}})))["cases"] == []


# Looking up a call


@pytest.mark.usefixtures("measured_gpu")
def test_the_order_of_the_nearest_case_and_then_the_usual_one() -> None:
    assert order(SPEC, "torch", "sm90") == ("flash3", "flash4", "sdpa_cudnn", "flash2", "flex", "math")
    assert order(replace(SPEC, q_len=200, kv_len=200), "torch", "sm90")[:3] == ("sdpa_cudnn", "flash2", "flash3")
    assert order(replace(SPEC, softcap=30.0), "torch", "sm90")[:3] == ("flash4", "flash2", "flash3")
    assert order(replace(SPEC, needs_backward=True), "torch", "sm90")[:2] == ("sdpa_cudnn", "flash4")


@pytest.mark.usefixtures("measured_gpu")
def test_both_frameworks_choose_the_same_for_long_calls() -> None:
    for spec in (SPEC, replace(SPEC, softcap=30.0), replace(SPEC, needs_backward=True)):
        torch, jax = order(spec, "torch", "sm90"), order(spec, "jax", "sm90")
        assert tuple(name for name in jax if not name.startswith("jax_")) == torch
        assert jax[jax.index("math") - 2 :] == ("jax_cudnn", "jax_xla", "math")


@pytest.mark.usefixtures("measured_gpu")
def test_short_calls_in_jax_prefer_backends_without_python() -> None:
    short = replace(SPEC, q_len=128, kv_len=128)
    in_order = order(short, "torch", "sm90")
    assert in_order[:3] == ("sdpa_cudnn", "flash2", "flash3") and in_order.index("flash4") > 2
    rest = [name for name in in_order if name not in ("flash4", "math")]
    assert order(short, "jax", "sm90") == ("flash4", "jax_cudnn", *rest, "jax_xla", "math")
    by_callback = replace(short, sinks=True)  # the compiled program of flash4 lacks it
    assert order(by_callback, "jax", "sm90")[:2] == ("jax_cudnn", "sdpa_cudnn")
    (case,) = cases_of(derive(raw_of(record("x", short, {"flash2": 59.9, "flash4": {"failed": "it died"}}))))
    with measured_on_sm90((case,)):
        assert order(short, "jax", "sm90")[0] == "jax_cudnn" and order(short, "jax", "sm90")[-1] == "flash4"
    with measured_on_sm90((case._replace(microseconds=60.0),)):
        assert order(short, "jax", "sm90")[0] == "flash2"
        assert order(replace(short, batch=3), "jax", "sm90")[0] == "jax_cudnn"  # three quarters of the time
        assert order(replace(short, batch=8), "jax", "sm90")[0] == "flash2"


@pytest.mark.usefixtures("measured_gpu")
def test_without_measurements_the_usual_order_applies() -> None:
    assert order(SPEC, "torch", "sm80") == USUAL
    assert order(SPEC, "jax", "sm100") == backends.PREFERENCE["jax", "cuda"]
    assert order(SPEC, "torch", "cpu") == order(SPEC, "torch", "mps") == ()
    assert measured("sm80") == ()


def test_unmeasured_backends_come_between_fast_and_slow_and_failures_last() -> None:
    entries = {"flash2": 10.0, "sdpa_cudnn": 39.0, "flex": 45.0, "math": 50.0, "flash4": {"failed": "it died"}}
    (case,) = cases_of(derive(raw_of(record("x", SPEC, entries))))
    assert ranking(case, USUAL) == ("flash2", "sdpa_cudnn", "flash3", "flex", "math", "flash4")
    jax = backends.PREFERENCE["jax", "cuda"]
    assert ranking(case, jax) == ("flash2", "sdpa_cudnn", "flash3", "flex", "jax_cudnn", "jax_xla", "math", "flash4")
    (case,) = cases_of(derive(raw_of(record("x", SPEC, {"flash2": 10.0, "xformers_splitk": 9.0}))))
    assert ranking(case, USUAL)[0] == "xformers_splitk"  # measured as the best, but not in the usual order


def test_features_are_ignored_in_order_until_a_case_matches() -> None:
    requested, size = features(replace(SPEC, num_kv_heads=32, sinks=True, window=(5, 0))), sizes(SPEC)
    actual = nearest(requested, size, CASES)
    assert actual is not None and (actual.name, actual.features.training) == ("long", False)
    assert nearest(requested._replace(softcap=True), size, CASES).name == "capped"  # type: ignore[union-attr]
    assert (
        nearest(requested._replace(training=True), size, CASES[:3]) is None
    )  # one direction does not decide the other
    assert set(preference.RELAXED) == set(Features._fields) - {"training"}


def test_features_of_a_call() -> None:
    def changed(**changes: Any) -> dict[str, Any]:
        before, after = features(SPEC)._asdict(), features(replace(SPEC, **changes))._asdict()
        return {name: value for name, value in after.items() if value != before[name]}

    assert changed() == changed(softcap=None, batch=2) == changed(dtype="float16") == {}
    assert changed(dtype="float32") == {"half": False}
    assert changed(q_len=1) == {"decode": True, "band": "full"}  # the single last query sees all keys
    assert changed(q_len=7) == {"decode": True}
    assert changed(causal=False) == {"band": "full"}
    assert changed(window=(100, 0)) == changed(causal=False, window=(3, 4)) == {"band": "window"}
    assert changed(causal=False, window=(5000, 5000)) == {"band": "full"}
    assert changed(num_kv_heads=32) == {"grouped": False}
    assert changed(head_dim=80, value_dim=72) == {"head_dim": 96}
    assert changed(head_dim=192) == {"head_dim": 192}
    assert changed(head_dim=512) == {"head_dim": 512}
    assert changed(mask_shape=(4, 1, 1, 4096)) == changed(bias_shape=(1, 1, 4096, 4096)) == {"dense": True}
    packed = {"batch": 1, "documents": 3, "max_len_q": 2048, "max_len_k": 2048}
    assert changed(**packed) == {"packed": True}
    assert features(replace(SPEC, q_len=64, kv_len=9000, **packed | {"max_len_q": 1})).decode


def test_sizes_are_logarithms_and_defined_for_any_call() -> None:
    assert sizes(replace(SPEC, causal=False)) == (31.0, 19.0, 17.0, 12.0, 7.0, 0.0)
    assert sizes(replace(SPEC, mask_shape=(1, 1, 4096, 4096)))[-1] == 24.0
    for spec in (replace(SPEC, q_len=0), replace(SPEC, kv_len=0), replace(SPEC, batch=0)):
        assert all(math.isfinite(size) for size in sizes(spec))
        features(spec)


# The cost of a choice


def test_regret_is_the_time_of_the_choice_over_the_best_time() -> None:
    actual = regrets(RAW, ())
    assert [(one.case, one.chosen, one.best, round(one.ratio, 3)) for one in actual] == [
        ("long", "flash3", "flash3", 1.0),
        ("short", "flash3", "sdpa_cudnn", 2.5),
        ("capped", "flash4", "flash4", 1.0),
        ("long", "flash4", "sdpa_cudnn", 1.086),
    ]
    facts = summary(actual)
    assert facts["forward"]["cases"] == 3
    assert facts["forward"]["geometric mean"] == pytest.approx(2.5 ** (1 / 3))
    assert facts["forward"]["worst"] == 2.5
    assert facts["forward"]["worst case"] == "short: flash3 for sdpa_cudnn"
    assert facts["training"]["geometric mean"] == pytest.approx(380 / 350)
    assert all(one.ratio <= 1.02 for one in regrets(RAW, CASES))


def test_leave_one_out_regret_of_a_table() -> None:
    actual = {(one.case, one.training): one for one in regrets(RAW, CASES, leave_out=True)}
    assert actual["short", False].chosen == "flash3"  # chosen by "long", the only similar case
    assert actual["long", False].chosen == "sdpa_cudnn"  # and the other way round
    assert actual["long", True].chosen == "flash4"  # nothing else has gradients, so the usual order applies


def test_a_choice_without_a_time_has_infinite_regret() -> None:
    entries = {"flash3": {"failed": "it died"}, "flash4": 10.0}
    (actual,) = regrets(raw_of(record("x", SPEC, entries)), ())
    assert (actual.chosen, actual.ratio) == ("flash3", math.inf)
    raw = raw_of(record("x", SPEC, entries))
    assert regrets(raw, cases_of(derive(raw)))[0].chosen == "flash4"


# The sweep and the work of a call


DRAWN = {kind: list(islice(random_calls(0, kind), 200)) for kind in LIMITS}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_random_calls_cover_real_calls(kind: str) -> None:
    cases = DRAWN[kind]
    assert len({case.name for case in (*cases, *QUICK)}) == len(cases) + len(QUICK)
    actual = [features(case.spec) for case in cases]
    assert {one.band for one in actual} == {"full", "causal", "window"}
    assert {64, 96, 128, 192, 256} <= {one.head_dim for one in actual}
    for name in ("half", "dense", "decode", "softcap", "packed", "sinks", "grouped", "alibi"):
        assert {getattr(one, name) for one in actual} == {True, False}, name
    specs = [case.spec for case in cases]
    assert {spec.head_dim for spec in specs} >= {64, 72, 80, 96, 128, 160, 256}
    assert any(spec.mask_shape for spec in specs) and any(spec.bias_shape for spec in specs)
    assert any(spec.q_len != spec.kv_len and spec.q_len > 16 for spec in specs)
    assert not any(spec.needs_backward for spec in specs)
    assert min(spec.q_len for spec in specs) == 1
    assert max(spec.q_len for spec in specs) > LIMITS[kind].length / 2
    decoding = [case for case in cases if " decode " in case.name]
    assert decoding and not any(case.training for case in decoding)


@pytest.mark.parametrize("kind", LIMITS)
def test_the_random_calls_stay_within_the_limits(kind: str) -> None:
    limits = LIMITS[kind]
    for case in DRAWN[kind]:
        spec = case.spec
        assert max(spec.q_len, spec.kv_len) <= limits.length or spec.packed
        assert spec.batch <= limits.batch and spec.num_heads <= limits.heads
        assert flops(spec, case.lengths) <= limits.work
        assert math.prod(spec.mask_shape or (0,)) + math.prod(spec.bias_shape or (0,)) <= limits.scores


def test_the_random_calls_are_the_same_everywhere() -> None:
    assert [random_call(0, number, "cuda") for number in range(9)] == DRAWN["cuda"][:9]
    assert random_call(1, 0, "cuda") != random_call(0, 0, "cuda") != random_call(0, 0, "cpu")
    assert DRAWN["cuda"][0].name == "#0 cross 30x512:226 h32/32 d32 fp16"


@pytest.mark.parametrize("case", (*DRAWN["cuda"][:120], *DRAWN["cpu"][:40], *QUICK), ids=lambda case: case.name)
def test_every_case_describes_its_call(case: Any) -> None:
    spec = case.spec
    assert spec_of(json.loads(json.dumps(plain_fields(spec)))) == spec
    assert (case.lengths is not None) is spec.packed
    if case.lengths is not None:
        assert (sum(case.lengths), len(case.lengths), max(case.lengths)) == (spec.q_len, spec.documents, spec.max_len_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (0, 0), (5, 40), (50, 1)])
def test_visible_pairs_are_counted_correctly(causal: bool, alignment: Any, window: Any) -> None:
    for q_len, kv_len in ((7, 7), (5, 13), (13, 5), (1, 11), (11, 1)):
        spec = replace(SPEC, q_len=q_len, kv_len=kv_len, causal=causal, alignment=alignment, window=window)
        assert pairs(spec) == masks.visible(spec).sum()
    lengths = (3, 0, 7, 2)
    packed = {"batch": 1, "q_len": 12, "kv_len": 12, "documents": 4, "max_len_q": 7, "max_len_k": 7}
    spec = replace(SPEC, causal=causal, alignment=alignment, window=window, **packed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert pairs(spec, lengths) == masks.visible(spec, None, offsets, offsets).sum()
    assert pairs(replace(spec, q_len=14, kv_len=14, documents=2)) == pairs(spec, (7, 7))


def test_flops_of_a_call() -> None:
    assert flops(replace(SPEC, causal=False)) == 4.0 * 4 * 32 * 4096**2 * 128
    assert flops(replace(SPEC, needs_backward=True)) == 3.5 * flops(SPEC)
    work = [flops(replace(SPEC, window=(keys, 0))) for keys in (10, 100, 5000)]
    assert all(one < other for one, other in pairwise(work))
    assert work[-1] == flops(SPEC)


# The shipped tables


def test_shipped_tables_hold_only_known_exact_backends() -> None:
    for path in (ROOT / "attn_core/selection/measured").glob("*.json"):
        cases = measured(path.stem)
        assert cases
        for case in cases:
            names = {name for name, _ in case.times} | set(case.failed)
            assert names <= set(backends.names())
            for name in names:
                backend = backends.load(name, backends.kind_of(path.stem))
                assert not backend.FORWARD.approximate and not backend.FORWARD.unproven


def test_the_order_needs_neither_framework() -> None:
    imports = "import sys; import attn_core.selection.preference"
    code = imports + "; sys.exit(bool({'torch', 'jax', 'typer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
