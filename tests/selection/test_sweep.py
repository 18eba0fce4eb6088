"""Tests that a sweep of calls measures every case, continues where it stopped, and says what it left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quick_calls import QUICK

from attn_core import AttentionSpec, backends
from attn_core.cli import in_jax, timing
from attn_core.errors import SpecError
from attn_core.selection import Target
from benchmarks.fit import choice, sweep
from benchmarks.fit.choice import Fitting
from benchmarks.fit.records import read, write
from benchmarks.fit.sweep import Sweep, candidates

torch = pytest.importorskip("torch")

NAMES = ("sdpa_flash", "math")


def nothing(record: Any) -> None:
    pass


@pytest.fixture(scope="module")
def raw() -> dict[str, Any]:
    measured = Sweep("cpu", 1, names=NAMES)
    assert measured.run(QUICK, None, nothing)
    return measured.raw


@pytest.mark.slow
def test_a_quick_sweep_on_the_cpu_measures_every_case(raw: dict[str, Any]) -> None:
    assert raw["device"] == "cpu" and raw["device_name"] and raw["versions"]["torch"] and raw["date"]
    directions = {(record["name"], record["direction"]) for record in raw["cases"]}
    assert directions == {(case.name, "forward") for case in QUICK} | {
        (case.name, "training") for case in QUICK if case.training
    }
    for record in raw["cases"]:
        math_entry, flash = record["backends"]["math"], record["backends"]["sdpa_flash"]
        assert math_entry["median"] > 0 and len(math_entry["microseconds"]) == 1
        assert math_entry["difference"] < 1e-5
        if "softcap" in record["name"]:
            assert flash == {"refused": ["softcap=50.0: the aten CPU flash kernel has none"]}
            assert record["selected"] == "math"
        else:
            assert flash["median"] > 0 and record["selected"] == "sdpa_flash"


def test_a_time_of_another_kernel_than_the_model_s_is_marked(replace_fields: Any) -> None:
    replace_fields(backends.load("math"), modelled=lambda spec: False)
    measured = Sweep("cpu", 1, names=NAMES)
    assert measured.run(QUICK[:1], None, nothing)
    for record in measured.raw["cases"]:
        assert record["backends"]["math"]["modelled"] is False and "modelled" not in record["backends"]["sdpa_flash"]


@pytest.mark.slow
def test_a_sweep_in_jax_has_jax_nn_beside_it() -> None:
    pytest.importorskip("jax")
    measured = Sweep("cpu", 1, "jax", ("jax_xla",))
    assert measured.run(QUICK[:2], None, nothing)
    for record in measured.raw["cases"]:
        assert record["beside"]["jax.nn"]["difference"] < 1e-5 and "median" in record["backends"]["jax_xla"]


def test_jax_nn_stands_beside_calls_that_it_has_arguments_for() -> None:
    plain = {"batch": 1, "q_len": 8, "kv_len": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16}
    for changes, expected in (({}, True), ({"value_dim": 8}, False), ({"kv_len": 9, "causal": True}, False)):
        spec = AttentionSpec(**{**plain, "dtype": "float32", **changes})
        assert bool(in_jax.own_functions(spec, "cpu")) == expected, changes


@pytest.mark.slow
def test_a_table_is_derived_from_a_sweep(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "FEWEST", 2)  # the quick cases are too few for models of real use
    table = Fitting(raw).table()
    assert table["calls"] == len(QUICK) and set(table["models"]["training"]) == set(NAMES)
    shown = choice.report(Fitting(raw))
    assert "| predicted, unseen calls | training |" in shown and "| F.sdpa | forward |" in shown


@pytest.mark.slow
def test_a_sweep_continues_where_it_stopped(raw: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    *done_before, missing = raw["cases"]  # as if the sweep had stopped before its last case
    write(raw | {"cases": done_before}, path)
    again = Sweep("cpu", 1, names=NAMES)
    again.resume(read(path))
    assert not again.run(QUICK, 0.0, nothing), "no time for more cases"
    assert again.run(QUICK, None, nothing)
    actual = json.loads(json.dumps(again.raw["cases"]))
    assert actual[:-1] == json.loads(json.dumps(done_before))
    assert [actual[-1][key] for key in ("name", "direction")] == [missing["name"], missing["direction"]]
    with pytest.raises(SpecError, match="the file has backends="):
        Sweep("cpu", 1, names=NAMES[:1]).resume(read(path))


def test_approximate_backends_are_not_measured() -> None:
    assert set(candidates(Target("torch", "cpu"))) >= {"sdpa_flash", "math"}
    for name in candidates(Target("torch", "sm90")):
        assert not name.startswith(("sage", "jax_", "flash3_fp8"))


def test_the_data_names_skipped_cases_and_the_backend_that_lost_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "MOST_SCORES", 1)
    monkeypatch.setattr(sweep, "INSTEAD_OF_FLEX", ("sdpa_flash",))
    measured = Sweep("cpu", 1, names=("sdpa_flash", "math", "flex"))
    dense = [case for case in QUICK if case.name.startswith("quick full")]
    assert measured.run(dense, None, nothing)
    forward = measured.raw["cases"][0]["backends"]
    assert forward["math"]["skipped"].endswith("other backends run this case")
    assert "compiles for seconds" in forward["flex"]["skipped"]

    def lost(*_: Any) -> Any:
        raise timing.DeviceLostError("sdpa_flash: RuntimeError: an illegal memory access")

    monkeypatch.setattr(sweep, "timed", lost)
    other = [case for case in QUICK if case.name.startswith("quick causal")]
    with pytest.raises(timing.DeviceLostError):
        measured.run(other, None, nothing)
    entries = measured.raw["cases"][-1]["backends"]
    assert entries["sdpa_flash"] == {"failed": "sdpa_flash: RuntimeError: an illegal memory access"}
    assert measured.run(dense, None, lambda record: pytest.fail("measured again"))


@pytest.mark.slow
def test_the_script_writes_the_raw_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "random_calls", lambda seed, kind: iter(QUICK))
    path = tmp_path / "times.json"
    sweep.main(["--device", "cpu", "--calls", "1", "--rounds", "1", "--json", str(path)])
    assert [record["direction"] for record in read(path)["cases"]] == ["forward", "training"]
    with pytest.raises(SystemExit, match="2"):
        sweep.main(["--device", "cpu", "--rounds", "2", "--json", str(path)])
