"""Tests several sweeps of one device: the newest alone says how long the host takes, and each is chosen for unseen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cost_tables import made_up_model

from attn_core.call.spec import AttentionSpec
from attn_core.cli.bench import regret_table
from attn_core.cli.bench_sweep import read, write
from attn_core.errors import SpecError
from attn_core.selection import sweeps
from attn_core.selection.cost_model import microseconds
from attn_core.selection.cross_validation import Fitting
from attn_core.selection.features import kind_of_call
from attn_core.selection.random_calls import random_calls
from attn_core.selection.regret import right_times, summary
from attn_core.selection.samples import counts
from attn_core.selection.sizes import sizes_of_call
from attn_core.selection.sweep import plain_fields
from attn_core.selection.sweeps import regrets_of_new_sweeps, together, with_orders, without
from attn_core.selection.tables import table_of
from benchmarks import sweep_preference, sweep_report

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
            kind, sizes = kind_of_call(spec), sizes_of_call(spec, 128, 132)
            entries = {}
            for name, model in models.items():
                time = microseconds(model, kind, sizes) * random.lognormvariate(0, 0.01)
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


OLD, NEW = sweep(0, {name: 3 * host for name, host in HOSTS.items()}), sweep(1, HOSTS)


def test_sweeps_are_merged_by_date() -> None:
    merged = together([NEW, OLD])
    assert merged == together([OLD, NEW]) and together([OLD]) is OLD
    assert [facts["date"] for facts in merged["sweeps"]] == list(DATES) and merged["date"] == DATES[1]
    assert merged["seconds"] == 20.0
    assert {(case["sweep"], case["older"]) for case in merged["cases"]} == {(0, True), (1, False)}
    again = together([OLD, OLD | {"date": "2020-01-03"}])["cases"]
    assert len({case["name"] for case in again}) == len(again) / 2  # each in both directions
    first, second = without(merged, 1), without(merged, 0)
    assert {(case["sweep"], case["older"]) for case in first["cases"]} == {(0, False)}
    assert {(case["sweep"], case["older"]) for case in second["cases"]} == {(1, False)}


def test_sweeps_of_different_devices_are_not_merged() -> None:
    with pytest.raises(SpecError, match="different devices cannot be fitted together: sm90, sm80"):
        together([OLD, NEW | {"device": "sm80"}])
    with pytest.raises(SpecError, match="cannot be merged again"):
        together([NEW, together([NEW, OLD])])


@pytest.mark.slow
def test_the_newest_sweep_decides_how_long_the_host_takes() -> None:
    tiny = kind_of_call(SPEC), sizes_of_call(SPEC, 128, 132)
    for models in Fitting(together([OLD, NEW])).models.values():
        for name, host in HOSTS.items():
            assert microseconds(models[name], *tiny) == pytest.approx(host, rel=0.1)


def test_an_older_sweep_counts_where_the_device_decided() -> None:
    merged = together([OLD, NEW])
    fitting = Fitting(merged)
    kept = {(record["name"], record["direction"]) for record in fitting.counted}
    for record in merged["cases"]:
        time, best = min((time, name) for name, time in right_times(record).items())
        by_host = time < 1.15 * 3 * HOSTS[best]
        assert ((record["name"], record["direction"]) in kept) is (not record["older"] or not by_host)
        assert counts(record | {"older": False})
    assert 120 < len(kept) < 240


@pytest.mark.slow
def test_each_sweep_is_chosen_for_by_the_others() -> None:
    fitting = Fitting(with_orders(together([OLD, NEW])))
    chosen = regrets_of_new_sweeps(fitting)
    assert list(chosen) == list(DATES) and len(chosen[DATES[1]]) == 120 > len(chosen[DATES[0]]) > 0
    # Models of the old sweep alone believe in its slow host.
    for these in chosen.values():
        for facts in summary(these).values():
            assert facts["geometric mean"] < 1.05
    table = regret_table(fitting)
    assert f"| predicted order, sweep of {DATES[0]} unseen, torch alone |" not in table  # nothing of torch was measured
    assert f"| predicted order, sweep of {DATES[1]} unseen | training | 60 |" in table
    alone = Fitting(with_orders(NEW))
    assert regrets_of_new_sweeps(alone) == {} and all(math.isfinite(one.ratio) for one in alone.regrets())


@pytest.mark.slow
def test_the_scripts_take_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for raw, path in zip((OLD, NEW), paths, strict=True):
        write(raw, path)
    files = [str(path) for path in paths]
    merged = tmp_path / "merged.json"
    sweep_preference.main([*files, "--together", str(merged), "--write", str(tmp_path)])
    assert f"sweep of {DATES[0]} unseen" in capsys.readouterr().out
    assert json.loads((tmp_path / "torch-sm90.json").read_text())["date"] == DATES[1]
    page = sweep_report.page(Fitting(read(merged)))
    assert f"times measured on {DATES[0]} and {DATES[1]}" in page and sweep_report.OLDER in page
    sweep_report.main(files)
    assert capsys.readouterr().out.strip() == page.strip()
    with pytest.raises(SystemExit, match="2"):
        sweep_preference.main([*files, "--write", str(tmp_path)])


@pytest.mark.slow
def test_a_sweep_of_another_gpu_is_judged_by_the_table_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(Fitting(OLD).table())
    monkeypatch.setattr(sweeps, "shipped_table", lambda framework, device: table)
    other = NEW | {"device_name": "NVIDIA H1234 80GB"}
    assert sweeps.regrets_of_package(Fitting(other)) == []
    judged = Fitting(sweeps.with_package_order(other))
    assert judged.raw["package"] == f"fitted to {table.source}"
    assert sweep_report.stem_of(judged.raw) == "sweep-sm90-h1234"
    chosen = sweeps.regrets_of_package(judged)
    assert len(chosen) == len(judged.counted) and summary(chosen)["forward"]["geometric mean"] < 1.1
    page = sweep_report.page(judged)
    assert f"| the package's order, fitted to {table.source} | training |" in page
    assert "none of\nthese calls" in page
    # A table that prefers the slower backend shows in the figures.
    swapped = {training: {"flash2": models["flash3"]} for training, models in table.models.items()}
    table = replace(table, models=swapped)
    wrong = sweeps.regrets_of_package(Fitting(sweeps.with_package_order(other)))
    assert summary(wrong)["forward"]["geometric mean"] > 1.2


@pytest.mark.slow
def test_a_sweep_of_a_cpu_is_judged_by_the_order_without_a_table() -> None:
    names = {"flash3": "sdpa_flash", "flash2": "math"}
    cases = [
        record | {"backends": {names[name]: entry for name, entry in record["backends"].items()}}
        for record in NEW["cases"]
    ]
    judged = Fitting(sweeps.with_package_order(NEW | {"device": "cpu", "device_name": "A CPU", "cases": cases}))
    assert judged.raw["package"] == "without a table" and sweep_report.stem_of(judged.raw) == "sweep-cpu"
    assert all(record["package_order"] == ["sdpa_flash", "math", "flex"] for record in judged.records)
    assert "| the package's order, without a table | forward |" in sweep_report.page(judged)
