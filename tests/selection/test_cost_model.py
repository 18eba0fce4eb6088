"""Tests the cost models: the fit predicts made-up times, no call is chosen by a model that saw it, and the cost of a
choice is counted right."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from cost_tables import made_up_model, modelled_times

from attn_core.call.spec import AttentionSpec
from attn_core.selection.cost_model import (
    EFFECTS,
    FACTORS,
    LEAST_HOST,
    RATES,
    Kind,
    Model,
    Models,
    kind_of_call,
    microseconds,
    sizes_of_call,
)
from attn_core.selection.tables import shipped_table, table_of, write_table
from benchmarks.fit import choice
from benchmarks.fit.calls import random_calls
from benchmarks.fit.choice import FEWEST, Fitting
from benchmarks.fit.models import Sample, _Problem, fit, slowness
from benchmarks.fit.records import (
    LEAST_WEIGHT,
    measured_records,
    plain_fields,
    read,
    record_spec,
    regrets,
    right_times,
    samples_of,
    static_order,
    summary,
)

ROOT = Path(__file__).resolve().parents[2]
SPEC = AttentionSpec(
    batch=4, q_len=512, kv_len=512, num_heads=8, num_kv_heads=8, head_dim=64, value_dim=64, dtype="bfloat16"
)
TRUTH = {
    "flash3": made_up_model(40.0, constant=6.0, work=2.0, memory=25.0),
    "flash2": made_up_model(17.0, constant=5.0, work=4.0, memory=30.0),
    "math": made_up_model(90.0, constant=30.0, rectangle=60.0, scores=400.0, effects={"softcap": 1.5}),
}
"""The models that the made-up measurements follow."""


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


def made_up_raw(calls: int, noise: float = 0.01) -> dict[str, Any]:
    """Times of random calls by TRUTH, with noise."""
    random, records = Random(0), []
    for case in islice(random_calls(0, "cuda"), calls):
        for direction in ("forward", "training") if case.training else ("forward",):
            spec = replace(case.spec, needs_backward=direction == "training")
            right = modelled_times(TRUTH, spec)
            times = {name: time * random.lognormvariate(0, noise) for name, time in right.items()}
            records.append(record(case.name, case.spec, times, direction))
    return raw_of(*records)


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    return made_up_raw(200)


@pytest.fixture(scope="module")
def fitting(raw: dict[str, Any]) -> Fitting:
    return Fitting(raw)


@pytest.fixture
def two_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three fits in place of eleven, where nobody judges how well a model predicts unseen calls."""
    monkeypatch.setattr(choice, "FOLDS", 2)


# The models


def test_a_model_is_the_longer_of_the_host_and_the_sum_of_rates_times_sizes() -> None:
    kind, sizes = kind_of_call(SPEC), sizes_of_call(SPEC, 128, 132)
    assert microseconds(made_up_model(1.0, work=2.0, memory=3.0), kind, sizes) == pytest.approx(
        2 * sizes.work + 3 * sizes.memory
    )
    assert microseconds(made_up_model(1e6, work=2.0), kind, sizes) == pytest.approx(1e6)
    capped = kind_of_call(replace(SPEC, softcap=1.0))
    model = made_up_model(1.0, effects={"softcap": 1.5}, work=2.0)
    assert microseconds(model, capped, sizes) == pytest.approx(1.5 * microseconds(model, kind, sizes))


def test_stacked_models_have_the_rates_of_each_and_its_factor() -> None:
    kind = kind_of_call(replace(SPEC, softcap=1.0))
    stacked = Models(list(TRUTH.values()), [1.0, 2.0, 3.0]).of_kind(kind)
    for factor, model, rates in zip((1.0, 2.0, 3.0), TRUTH.values(), stacked, strict=True):
        (alone,) = Models([model], [1.0]).of_kind(kind)
        assert rates == pytest.approx([factor * rate for rate in alone])


def test_effects_on_the_host_add_up() -> None:
    def host(**logarithms: float) -> float:
        named = {name.replace("_", " "): value for name, value in logarithms.items()}
        factors = tuple(named.get(name, 0.0) if group == "host" else 0.0 for group, name, _ in FACTORS)
        model = made_up_model(20.0)._replace(factors=factors)
        return microseconds(model, kind_of_call(replace(SPEC, softcap=1.0, sinks=True)), sizes)

    sizes = sizes_of_call(SPEC, 128, 132)
    assert host(softcap=math.log(4)) == pytest.approx(80)
    assert host(softcap=math.log(4), sinks=math.log(3), packed=9.0) == pytest.approx(20 * (1 + 3 + 2))
    assert host(softcap=-3.0, sinks=-3.0) == pytest.approx(20 * LEAST_HOST)


def test_the_slopes_of_a_fit_are_those_of_its_loss() -> None:
    random, samples = np.random.default_rng(0), []
    for case in islice(random_calls(2, "cuda"), 40):
        kind, sizes = kind_of_call(case.spec), sizes_of_call(case.spec, 128, 132)
        times = np.exp(random.normal(4, 1, 2))
        samples.append(Sample(kind, sizes, float(times.max()), float(times.min()), 1.0, 0.1))
    problem = _Problem(samples)
    center = problem.center(None)
    parameters = center + random.normal(0, 0.1, len(center))
    gradient, _ = problem.slopes(parameters, center, 0.3)
    for place in range(0, len(center), 7):
        step = 1e-5 * np.eye(len(center))[place]
        higher, lower = (problem.loss(parameters + sign * step, center, 0.3) for sign in (1, -1))
        assert (higher - lower) / 2e-5 == pytest.approx(2 * gradient[place], rel=1e-3, abs=1e-3)


def test_every_effect_applies_to_some_call() -> None:
    kinds = [kind_of_call(case.spec) for case in islice(random_calls(0, "cuda"), 300)]
    for name, applies in EFFECTS.items():
        assert 0 < sum(map(applies, kinds)) < len(kinds), name


def test_every_factor_multiplies_some_rates() -> None:
    assert len({(group, name) for group, name, _ in FACTORS}) == len(FACTORS)
    for group, name, places in FACTORS:
        assert places and name in EFFECTS, group
    assert {place for _, _, places in FACTORS for place in places} == set(range(len(RATES)))


# The fit


@pytest.mark.slow
def test_a_fit_predicts_calls_that_it_did_not_see(fitting: Fitting) -> None:
    for name in TRUTH:
        errors = sorted(
            abs(math.log(predicted[name] / right_times(measured)[name]))
            for measured, predicted in zip(fitting.records, fitting.unseen, strict=True)
        )
        assert errors[len(errors) // 2] < 0.03, name
        assert errors[math.ceil(0.9 * len(errors)) - 1] < 0.1, name
    assert {name for name in fitting.models[True]} == set(TRUTH)
    assert all(0 < model.error < 0.3 for models in fitting.models.values() for model in models.values())


@pytest.mark.slow
def test_the_choice_by_held_out_predictions_costs_little(fitting: Fitting, raw: dict[str, Any]) -> None:
    for facts in summary(fitting.regrets()).values():
        assert facts["geometric mean"] < 1.01 and facts["99th percentile"] < 1.1
        assert facts["worst"] >= facts["99th percentile"]
    static = summary(regrets(fitting.records, static_order(raw)))
    assert static["forward"]["geometric mean"] > 1.1
    alone = fitting.regrets(("math", "flex"))
    assert {regret.chosen for regret in alone} == {"math"} and {regret.ratio for regret in alone} == {1.0}


@pytest.mark.slow
@pytest.mark.usefixtures("two_folds")
def test_no_call_is_chosen_by_a_model_that_saw_it(raw: dict[str, Any]) -> None:
    odd = record("#0 odd", SPEC, {name: {"median": 1e9, "difference": 0.0} for name in TRUTH})
    with_odd = Fitting(raw_of(odd, *raw["cases"][40:]))
    assert all(time < 1e6 for time in with_odd.unseen[0].values())  # nothing else takes as long


def test_a_fit_finds_rates_of_any_scale() -> None:
    kind, slow = kind_of_call(SPEC), made_up_model(1.0, constant=2e3, work=3e5, memory=5e6)
    sizes = [
        sizes_of_call(replace(SPEC, q_len=n, kv_len=n, batch=b), 32, 8) for n in range(32, 2048, 96) for b in (1, 7)
    ]
    fitted = fit([Sample(kind, each, microseconds(slow, kind, each), 0.0) for each in sizes])
    for each in sizes:
        assert microseconds(fitted, kind, each) == pytest.approx(microseconds(slow, kind, each), rel=0.03)


@pytest.mark.usefixtures("two_folds")
def test_a_backend_with_few_calls_learns_from_the_others() -> None:
    slow_cap = {
        name: made_up_model(1.0, constant=constant, work=2.0, effects={"softcap": 3.0})
        for name, constant in (("flash3", 5.0), ("flash2", 6.0))
    }
    records = []
    for place, length in enumerate(range(64, 4096, 64)):
        spec = replace(SPEC, q_len=length, kv_len=length, softcap=9.0 if place % 2 else None)
        kind, sizes = kind_of_call(spec), sizes_of_call(spec, 128, 132)
        times = {name: microseconds(model, kind, sizes) for name, model in slow_cap.items()}
        if place % 2:
            times.pop("flash2")  # it never ran with a softcap
        records.append(record(f"#{place}", spec, times))
    model = Fitting(raw_of(*records)).models[False]["flash2"]
    sizes = sizes_of_call(replace(SPEC, q_len=4096, kv_len=4096), 128, 132)
    plain, capped = (microseconds(model, kind_of_call(replace(SPEC, softcap=cap)), sizes) for cap in (None, 9.0))
    assert 2.0 < capped / plain < 4.0


def test_one_wrong_measurement_does_little_harm() -> None:
    kind, model = kind_of_call(SPEC), TRUTH["flash2"]
    samples = []
    for length in range(64, 4096, 64):
        sizes = sizes_of_call(replace(SPEC, q_len=length, kv_len=length), 128, 132)
        samples.append(Sample(kind, sizes, microseconds(model, kind, sizes), 0.0))
    samples[30] = samples[30]._replace(microseconds=50 * samples[30].microseconds)
    fitted = fit(samples)
    for sample in samples[:30] + samples[31:]:
        assert microseconds(fitted, kind, sample.sizes) == pytest.approx(sample.microseconds, rel=0.1)


def test_a_fit_to_few_calls_stays_near_its_start() -> None:
    kind, sizes = kind_of_call(SPEC), sizes_of_call(SPEC, 128, 132)
    start = TRUTH["flash2"]
    twice = fit([Sample(kind, sizes, 2 * microseconds(start, kind, sizes), 0.0)], start)
    assert microseconds(twice, kind, sizes) == pytest.approx(2 * microseconds(start, kind, sizes), rel=0.1)
    capped = kind_of_call(replace(SPEC, softcap=1.0))
    assert microseconds(twice, capped, sizes) == pytest.approx(microseconds(twice, kind, sizes), rel=0.1)


@pytest.mark.usefixtures("two_folds")
def test_a_table_says_the_same_after_reading(tmp_path: Path) -> None:
    fitting = Fitting(made_up_raw(60))
    write_table(fitting.table(), tmp_path / "new folder" / "table.json")
    content = json.loads((tmp_path / "new folder" / "table.json").read_text(encoding="utf-8"))
    assert content == json.loads(json.dumps(fitting.table()))
    table = table_of(content)
    assert table.source == "60 calls measured on a GPU, a day" and (table.tile, table.processors) == (128, 132)
    for case in islice(random_calls(1, "cuda"), 40):
        kind, sizes = kind_of_call(case.spec), sizes_of_call(case.spec, 128, 132)
        for name, model in fitting.models[False].items():
            read: Model = table.models[False][name]
            assert microseconds(read, kind, sizes) == pytest.approx(microseconds(model, kind, sizes), rel=0.05)
    assert content["held_out"]["forward"]["cases"] == 60


def test_the_stored_sweep_has_calls_for_every_model_that_ships() -> None:
    """A backend that a refit drops would lose its row."""
    shipped = shipped_table("torch", "sm90")
    records = measured_records(read(ROOT / "benchmarks/results/sweep-sm90.json"))
    names = tuple(dict.fromkeys(name for models in shipped.models.values() for name in models))
    samples = samples_of(records, names, "cuda", shipped.tile, shipped.processors)
    for training, models in shipped.models.items():
        assert {name for direction, name in samples if direction is training} == models.keys()
        assert all(len(samples[training, name]) >= FEWEST for name in models)


@pytest.mark.usefixtures("two_folds")
def test_a_backend_that_launches_the_kernels_of_others_has_no_model(raw: dict[str, Any]) -> None:
    cases = []
    for one in raw["cases"][:60]:
        other = one["backends"]["flash2"] | {"modelled": False}
        cases.append(one | {"backends": one["backends"] | {"xformers": other}})
    fitted = Fitting(raw_of(*cases))
    assert all("xformers" not in times for times in fitted.unseen) and "xformers" not in fitted.models[False]
    assert "xformers" in fitted.ranked(fitted.records[0])


def test_a_time_counts_little_where_its_backend_is_never_chosen() -> None:
    cases = [record("alone", SPEC, {"flex": 3.0, "math": 2.0}), record("behind", SPEC, {"flex": 3.0})]
    cases[1]["backends"]["sdpa_efficient"] = {"median": 2.9, "difference": 0.0}
    samples = samples_of(cases, ("flex", "math", "sdpa_efficient"), "cuda", 128, 132)
    weights = [sample.weight for sample in samples[False, "flex"].values()]
    assert weights[0] > 0.9 and weights[1] == LEAST_WEIGHT


@pytest.mark.usefixtures("two_folds")
def test_a_backend_with_few_measurements_has_no_model(raw: dict[str, Any]) -> None:
    cases = [json.loads(json.dumps(one)) for one in raw["cases"][:60]]
    for one in cases[5:]:
        one["backends"].pop("math")
    fitted = Fitting(raw_of(*cases))
    assert "math" not in fitted.models[False] and "flash2" in fitted.models[False]
    assert fitted.ranked(fitted.records[0])[-1] == "math"


def test_calls_with_several_effects_are_not_slow() -> None:
    """The estimate of how busy the host was while each call was measured."""

    def host(usual: float, kind: Kind) -> float:
        """Microseconds in which sinks and packed documents add to each other."""
        return usual + 60.0 * kind.sinks + 50.0 * kind.packed

    usual_hosts = {"flash2": 20.0, "flash3": 30.0, "math": 90.0}
    kinds = [kind_of_call(replace(case.spec, needs_backward=False)) for case in islice(random_calls(0, "cuda"), 300)]
    assert any(kind.sinks and kind.packed for kind in kinds)
    slow = set(range(0, len(kinds), 10))
    hosts = [
        {name: host(usual, kind) * (1.5 if place in slow else 1.0) for name, usual in usual_hosts.items()}
        for place, kind in enumerate(kinds)
    ]
    measured = slowness(kinds, hosts)
    for place, (kind, value) in enumerate(zip(kinds, measured, strict=True)):
        # The residuals of three backends are shrunk, so slow calls seem less slow than log(1.5), 0.41.
        assert 0.15 < value < 0.45 if place in slow else abs(value) < 0.13, kind


# The cost of a choice


LONG = record("long", SPEC, {"flash3": 100.0, "flash4": 110.0, "sdpa_cudnn": 130.0, "math": 9000.0})
SHORT = record("short", replace(SPEC, q_len=128, kv_len=128), {"flash3": 50.0, "sdpa_cudnn": 20.0})
CAPPED = record(
    "capped", replace(SPEC, softcap=50.0), {"flash3": {"refused": ["no"]}, "flash4": 140.0, "flash2": 250.0}
)
TRAINED = record("long", SPEC, {"flash4": 380.0, "flash3": {"refused": ["no"]}, "sdpa_cudnn": 350.0}, "training")


def test_regret_is_the_time_of_the_choice_over_the_best_time() -> None:
    raw = raw_of(LONG, SHORT, CAPPED, TRAINED)
    actual = regrets(raw["cases"], static_order(raw))
    assert [(one.case, one.chosen, one.best, round(one.ratio, 3)) for one in actual] == [
        ("long", "flash3", "flash3", 1.0),
        ("short", "flash3", "sdpa_cudnn", 2.5),
        ("capped", "flash4", "flash4", 1.0),
        ("long", "flash4", "sdpa_cudnn", 1.086),
    ]
    facts = summary(actual)
    assert facts["forward"]["cases"] == 3
    assert facts["forward"]["geometric mean"] == pytest.approx(2.5 ** (1 / 3))
    assert facts["forward"]["worst"] == facts["forward"]["99th percentile"] == 2.5
    assert facts["forward"]["worst case"] == "short: flash3 for sdpa_cudnn"
    assert facts["training"]["geometric mean"] == pytest.approx(380 / 350)
    assert record_spec(TRAINED).needs_backward and not record_spec(LONG).needs_backward


def test_regret_counts_only_the_installed_backends() -> None:
    raw = raw_of(LONG, CAPPED)
    actual = regrets(raw["cases"], static_order(raw), only=("sdpa_cudnn", "math"))
    assert [(one.case, one.chosen, one.ratio) for one in actual] == [("long", "sdpa_cudnn", 1.0)]


def test_a_choice_that_failed_has_infinite_regret() -> None:
    raw = raw_of(record("x", SPEC, {"flash3": {"failed": "it died"}, "flash4": 10.0}))
    (actual,) = regrets(raw["cases"], static_order(raw))
    assert (actual.chosen, actual.ratio) == ("flash3", math.inf)
    skipped = raw_of(record("x", SPEC, {"flash3": {"skipped": "slow"}, "flash4": 10.0}))
    assert regrets(skipped["cases"], static_order(skipped))[0].chosen == "flash4"


def test_times_of_wrong_results_do_not_count() -> None:
    off, nan = ({"median": 1.0, "difference": gap} for gap in (0.5, math.nan))
    wrong = record("x", SPEC, {"flash3": 9.0, "flash2": off, "flex": nan, "math": 30.0, "flash4": {"failed": "died"}})
    assert right_times(wrong) == {"flash3": 9.0, "math": 30.0}
    no_majority = record("x", SPEC, {"flash3": 9.0, "flash2": off, "flex": off})
    nothing = record("x", SPEC, {"flash3": {"refused": ["no"]}})
    assert measured_records(raw_of(wrong, no_majority, nothing)) == [wrong]  # in the others no result is known right
