"""Tests several sweeps of one device: the newest alone says how long the host takes, and each is chosen for unseen."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cost_tables import made_up_model, modelled_times

import benchmarks.fit.__main__ as script
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.selection.tables import table_of
from benchmarks.fit import choice
from benchmarks.fit.calls import random_calls
from benchmarks.fit.choice import Fitting, report
from benchmarks.fit.records import (
    GOALS,
    counts,
    plain_fields,
    read,
    regrets,
    right_times,
    summary,
    together,
    write,
)

ROOT = Path(__file__).resolve().parents[2]
DATES = ("2020-01-01", "2020-01-02")
HOSTS = {"flash3": 40.0, "flash2": 17.0}
SPEC = AttentionSpec(
    batch=2, q_len=64, kv_len=64, num_heads=8, num_kv_heads=8, head_dim=64, value_dim=64, dtype="bfloat16"
)


def sweep(seed: int, hosts: dict[str, float], calls: int = 60) -> dict[str, Any]:
    """The raw times of random calls; flash2 works half as fast as flash3."""
    random, cases = Random(seed), []
    models = {
        name: made_up_model(host, constant=6.0, work=rate, memory=25.0)
        for (name, host), rate in zip(hosts.items(), (2.0, 4.0), strict=True)
    }
    for case in islice(random_calls(seed, "cuda"), calls):
        for direction in ("forward", "training"):
            spec = replace(case.spec, needs_backward=direction == "training")
            entries = {}
            for name, right in modelled_times(models, spec).items():
                time = right * random.lognormvariate(0, 0.01)
                entries[name] = {"median": time, "microseconds": [time], "host": hosts[name], "difference": 0.0}
            facts = {
                "name": case.name,
                "direction": direction,
                "spec": plain_fields(case.spec),
                "lengths": case.lengths,
            }
            cases.append(facts | {"backends": entries})
    head = {"format": 1, "date": DATES[seed], "device": "sm90", "device_name": "a GPU", "framework": "torch"}
    return head | {"versions": {"torch": "2"}, "rounds": 1, "seconds": 10.0, "cases": cases}


@pytest.fixture(autouse=True)
def two_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three fits in place of eleven: nobody judges here how well a model predicts unseen calls."""
    monkeypatch.setattr(choice, "FOLDS", 2)


@pytest.fixture(scope="module")
def old() -> dict[str, Any]:
    return sweep(0, {name: 3 * host for name, host in HOSTS.items()})


@pytest.fixture(scope="module")
def new() -> dict[str, Any]:
    return sweep(1, HOSTS)


def test_sweeps_are_merged_by_date(old: dict[str, Any], new: dict[str, Any]) -> None:
    merged = together([new, old])
    assert merged == together([old, new]) and together([old]) is old
    assert [facts["date"] for facts in merged["sweeps"]] == list(DATES) and merged["date"] == DATES[1]
    assert merged["seconds"] == 20.0
    assert {(case["sweep"], case["older"]) for case in merged["cases"]} == {(0, True), (1, False)}
    again = together([old, old | {"date": "2020-01-03"}])["cases"]
    assert len({case["name"] for case in again}) == len(again) / 2  # each in both directions


def test_sweeps_of_different_devices_are_not_merged(old: dict[str, Any], new: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="different devices cannot be fitted together: sm90, sm80"):
        together([old, new | {"device": "sm80"}])
    with pytest.raises(SpecError, match="cannot be merged again"):
        together([new, together([new, old])])


@pytest.mark.slow
def test_the_newest_sweep_decides_how_long_the_host_takes(old: dict[str, Any], new: dict[str, Any]) -> None:
    for models in Fitting(together([old, new])).models.values():
        assert modelled_times(models, SPEC) == pytest.approx(HOSTS, rel=0.1)


def test_an_older_sweep_counts_where_the_device_decided(old: dict[str, Any], new: dict[str, Any]) -> None:
    merged = together([old, new])
    fitting = Fitting(merged)
    kept = {(record["name"], record["direction"]) for record in fitting.counted}
    for record in merged["cases"]:
        time, best = min((time, name) for name, time in right_times(record).items())
        by_host = time < 1.15 * 3 * HOSTS[best]
        assert ((record["name"], record["direction"]) in kept) is (not record["older"] or not by_host)
        assert counts(record | {"older": False})
    assert 120 < len(kept) < 240


@pytest.mark.slow
def test_the_script_takes_several_files(
    old: dict[str, Any], new: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for raw, path in zip((old, new), paths, strict=True):
        write(raw, path)
    files = [str(path) for path in paths]
    merged = tmp_path / "merged.json"
    script.main([*files, "--together", str(merged), "--write", str(tmp_path)])
    said = capsys.readouterr().out
    assert "| predicted, unseen calls | training |" in said and f"written to {tmp_path / 'torch-sm90.json'}" in said
    table = json.loads((tmp_path / "torch-sm90.json").read_text())
    assert table["date"] == DATES[1]
    assert read(merged) == json.loads(json.dumps(together([old, new])))
    script.main([str(merged), "--write", str(tmp_path)])
    assert json.loads((tmp_path / "torch-sm90.json").read_text()) == table
    with pytest.raises(SystemExit, match="2"):
        script.main([files[0], "--judge", "--write", str(tmp_path)])


@pytest.mark.parametrize("path", ["no such file", __file__])
def test_unreadable_measurements_exit_with_2(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main([path])
    assert f"{path}: cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_of_another_gpu_is_judged_by_the_table_as_it_is(
    old: dict[str, Any], new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = table_of(Fitting(old).table())
    monkeypatch.setattr(choice, "shipped_table", lambda framework, device: table)
    fitting = Fitting(new | {"device_name": "NVIDIA H1234 80GB"})
    source, ranked = choice.package_order(fitting.raw)
    assert source == f"fitted to {table.source}"
    chosen = regrets(fitting.counted, ranked)
    assert len(chosen) == len(fitting.counted) and summary(chosen)["forward"]["geometric mean"] < 1.1
    assert f"| fitted to {table.source} | training |" in report(fitting, judge=True)
    # A table that prefers the slower backend shows in the figures.
    swapped = {training: {"flash2": models["flash3"]} for training, models in table.models.items()}
    table = replace(table, models=swapped)
    wrong = regrets(fitting.counted, choice.package_order(fitting.raw)[1])
    assert summary(wrong)["forward"]["geometric mean"] > 1.2


@pytest.mark.slow
def test_a_sweep_of_a_cpu_is_judged_by_the_order_without_a_table(new: dict[str, Any]) -> None:
    names = {"flash3": "sdpa_flash", "flash2": "math"}
    cases = [
        record | {"backends": {names[name]: entry for name, entry in record["backends"].items()}}
        for record in new["cases"]
    ]
    judged = Fitting(new | {"device": "cpu", "device_name": "A CPU", "cases": cases})
    source, ranked = choice.package_order(judged.raw)
    assert source == "without a table"
    assert all(tuple(ranked(record)) == ("sdpa_flash", "math", "flex") for record in judged.records)
    assert "| without a table | forward |" in report(judged, judge=True)


@pytest.mark.sampled
@pytest.mark.parametrize("stem", ["sweep-sm90-h100", "sweep-cpu", "sweep-jax-cpu"])
def test_the_package_chooses_well_in_stored_sweeps_that_its_tables_did_not_see(stem: str) -> None:
    fitting = Fitting(read(ROOT / f"benchmarks/results/{stem}.json"))
    for facts in summary(regrets(fitting.counted, choice.package_order(fitting.raw)[1])).values():
        assert facts["geometric mean"] <= GOALS[fitting.kind]["geometric mean"]
