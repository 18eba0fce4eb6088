"""Tests ``attn bench``: a quick sweep on the CPU from end to end, its failures, and its pages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from attn_core import AttentionSpec
from attn_core.cli import bench_jax, bench_sweep, bench_timing
from attn_core.cli.bench import bench, regrets_of_package, speeds_beside
from attn_core.cli.bench_sweep import Sweep, candidates, read
from attn_core.cli.plots import sweep_figure
from attn_core.selection import Target, cross_validation
from attn_core.selection.cross_validation import Fitting
from attn_core.selection.sweep import QUICK, SweepCase
from benchmarks import sweep_preference, sweep_report
from benchmarks.sweep_report import page

torch = pytest.importorskip("torch")

app = typer.Typer()
app.command()(bench)
FEW = ["--device", "cpu", "--quick", "--rounds", "1", "--backend", "sdpa_flash", "--backend", "math"]


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def raw_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "raw.json"
    done = run(*FEW, "--json", str(path))
    assert done.exit_code == 0, done.output
    return path


@pytest.mark.slow
def test_a_quick_sweep_on_the_cpu_measures_every_case(raw_file: Path) -> None:
    raw = read(raw_file)
    assert raw["device"] == "cpu" and raw["device_name"] and raw["versions"]["torch"] and raw["date"]
    directions = {(record["name"], record["direction"]) for record in raw["cases"]}
    assert directions == {(case.name, "forward") for case in QUICK} | {
        (case.name, "training") for case in QUICK if case.training
    }
    for record in raw["cases"]:
        math_entry, flash = record["backends"]["math"], record["backends"]["sdpa_flash"]
        assert math_entry["median"] > 0 and math_entry["tflops"] > 0 and len(math_entry["microseconds"]) == 1
        assert math_entry["difference"] < 1e-5
        if "softcap" in record["name"]:
            assert flash == {"refused": ["softcap=50.0: the aten CPU flash kernel has none"]}
            assert (record["reference"], record["selected"]) == ("math", "math")
        else:
            assert flash["median"] > 0 and record["selected"] == "sdpa_flash"


def test_results_are_awaited_once_after_a_queue() -> None:
    """As JAX needs it on a GPU: the host's time ends before the wait."""
    waited: list[Any] = []

    def call(name: str) -> tuple[Any, ...]:
        return (name,)

    call.wait = lambda results: (sleep(0.02), waited.append(results))  # type: ignore[attr-defined]
    total, host = bench_timing._queue(call, "a", 4, torch.device("cpu"))
    assert waited == [("a",)] and host < total


def test_backends_take_their_turns_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """As JAX needs it on a CPU: the threads of torch's OpenMP spin for a while after a call."""
    events: list[str] = []

    def call(name: str) -> tuple[Any, ...]:
        events.append(name)
        return (name,)

    call.pause = 0.25  # type: ignore[attr-defined]
    monkeypatch.setattr(bench_timing, "sleep", lambda seconds: events.append(f"pause {seconds}"))
    bench_timing._rounds(call, {"a": (1.0, 1.0), "b": (1.0, 1.0)}, 2, torch.device("cpu"))
    assert events == ["pause 0.25", "a", "pause 0.25", "b", "pause 0.25", "b", "pause 0.25", "a"]


@pytest.mark.slow
def test_a_sweep_in_jax_has_jax_nn_beside_it() -> None:
    pytest.importorskip("jax")
    sweep = Sweep("cpu", ("jax_xla",), 1, False, "jax")
    records: list[Any] = []
    assert sweep.run(QUICK[:2], None, records.append)
    for record in records:
        assert record["beside"]["jax.nn"]["difference"] < 1e-5 and "median" in record["backends"]["jax_xla"]


def test_jax_nn_stands_beside_calls_that_it_has_arguments_for() -> None:
    plain = {"batch": 1, "q_len": 8, "kv_len": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "value_dim": 16}
    for changes, expected in (({}, True), ({"value_dim": 8}, False), ({"kv_len": 9, "causal": True}, False)):
        spec = AttentionSpec(**{**plain, "dtype": "float32", **changes})
        assert bench_jax.has_jax_nn(spec) == expected, changes


@pytest.mark.slow
def test_derive_and_report_write_tables_and_pages(
    raw_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(cross_validation, "FEWEST", 2)  # the quick cases are too few for models of real use
    sweep_preference.main([str(raw_file), "--write", str(tmp_path)])
    assert "| predicted order, unseen calls | training |" in capsys.readouterr().out
    table = json.loads((tmp_path / "torch-cpu.json").read_text())
    assert table == json.loads(json.dumps(Fitting(read(raw_file)).table()))
    assert table["calls"] == len(QUICK) and set(table["models"]["training"]) == {"math", "sdpa_flash"}
    sweep_report.main([str(raw_file), "--write", str(tmp_path / "pages")])
    assert "written to" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "pages").iterdir()}
    assert names == {"sweep-cpu.md", "sweep-cpu-errors.png", "sweep-cpu-regret.png"}
    text = (tmp_path / "pages/sweep-cpu.md").read_text()
    assert f"| {QUICK[0].name} | " in text and "## Training" in text
    assert "| math | forward | 7 |" in text and "| F.sdpa | forward |" in text
    sweep_report.main([str(raw_file)])
    assert capsys.readouterr().out.startswith("# Sweep on ")


@pytest.mark.parametrize("script", [sweep_preference, sweep_report])
@pytest.mark.parametrize("path", ["no such file", __file__])
def test_unreadable_measurements_exit_with_2(script: Any, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main([path])
    assert f"{path}: cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep_continues_where_it_stopped(raw_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "raw.json"
    assert run(*FEW, "--only", "quick mask", "--json", str(path)).exit_code == 0
    first = read(path)
    assert [record["direction"] for record in first["cases"]] == ["forward", "training"]
    assert run(*FEW, "--resume", "--seconds", "0", "--json", str(path)).exit_code == 1  # no time for more cases
    assert read(path)["cases"] == first["cases"]
    others = [record for record in read(raw_file)["cases"] if "quick mask" not in record["name"]]
    *done_before, missing = others  # as if the sweep had stopped before its last case
    path.write_text(json.dumps({**first, "cases": [*first["cases"], *done_before]}))
    assert run(*FEW, "--resume", "--json", str(path)).exit_code == 0
    actual = read(path)
    assert actual["cases"][:-1] == [*first["cases"], *done_before]
    assert [actual["cases"][-1][key] for key in ("name", "direction")] == [missing["name"], missing["direction"]]
    done = run(*FEW[:-2], "--resume", "--json", str(path))
    assert done.exit_code == 2
    assert "--resume: the file has backends=" in done.stderr


def test_a_sweep_is_drawn(raw_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    copy, picture = tmp_path / "raw.json", tmp_path / "sweep.png"
    copy.write_bytes(raw_file.read_bytes())
    done = run(*FEW, "--json", str(copy), "--resume", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert f"wrote {picture}" in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_drawn_sweep_sorts_the_speeds_on_a_log_scale() -> None:
    pytest.importorskip("matplotlib")
    fitting = Fitting(read(Path(__file__).parents[2] / "benchmarks/results/sweep-jax-cpu.json"))
    speeds = speeds_beside(fitting)[0]
    beside, cost = sweep_figure(fitting, speeds, regrets_of_package(fitting)).axes
    expected = [sorted(ratio for ratio, _ in pairs) for pairs in speeds.values()]
    # The last line of a panel is the mark at 1.
    assert [list(line.get_ydata()) for line in beside.lines[:-1]] == expected
    assert beside.get_yscale() == cost.get_yscale() == "log"
    labels = [text.get_text() for text in beside.get_legend().get_texts()]
    assert [label.partition(":")[0] for label in labels] == ["jax.nn, forward", "jax.nn, training"]
    assert all(min(line.get_ydata()) >= 1 for line in cost.lines)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "sm90"], "--device=sm90: expected a device of this machine"),
        (["--device", "npu"], "--device='npu': no such device; did you mean xpu? Expected one of"),
        (["--device", "cpu", "--only", "nothing like it"], "no case contains it"),
        (["--device", "cpu", "--resume"], "--resume: expected --json"),
        (["--device", "cpu", "--backend", "flsh3"], "did you mean flash3"),
    ],
)
def test_bad_options_are_named_and_exit_with_2(arguments: list[str], text: str) -> None:
    if torch.cuda.is_available() and "sm90" in arguments:
        pytest.skip("there may be one")
    done = run(*arguments)
    assert done.exit_code == 2, done.output
    assert text in done.stderr.replace("\n", " ")


def test_approximate_backends_are_not_measured() -> None:
    assert set(candidates(Target("torch", "cpu"))) >= {"sdpa_flash", "math"}
    for name in candidates(Target("torch", "sm90")):
        assert not name.startswith(("sage", "jax_", "flash3_fp8"))


# Timing, with plain functions in place of backends


def one(value: float) -> tuple[Any, ...]:
    return (torch.full((3,), value),)


def measure(results: dict[str, Any], rounds: int = 3) -> bench_timing.Timing:
    def call(name: str) -> tuple[Any, ...]:
        actual = results[name]
        if isinstance(actual, Exception):
            raise actual
        return actual

    return bench_timing.measure(call, list(results), rounds, torch.device("cpu"))


def test_results_are_compared_with_the_first_backend_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_timing, "_queue", lambda run, name, count, device: (run(name), (1e-6, 1e-6))[1])
    actual = measure(
        {"a": ValueError("no\nreally"), "b": one(math.nan), "c": one(2.0), "d": one(2.5), "e": one(2.0)}, rounds=4
    )
    assert actual.reference == "c"
    assert list(actual.entries) == ["a", "b", "c", "d", "e"]
    assert actual.entries["a"] == {"failed": "ValueError: no"}
    assert actual.entries["b"] == {"failed": "its results are not finite"}
    assert [actual.entries[name]["difference"] for name in "cde"] == [0.0, 0.25, 0.0]
    for name in "cde":
        entry = actual.entries[name]
        assert len(entry["microseconds"]) == 4
        assert min(entry["microseconds"]) <= entry["median"] <= max(entry["microseconds"])


def test_a_case_that_no_backend_runs_has_no_times() -> None:
    actual = measure({"a": ValueError("no")})
    assert actual == ({"a": {"failed": "ValueError: no"}}, None)


@pytest.mark.slow
def test_very_slow_calls_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"quick": 0, "slow": 0}
    seconds = {"quick": 0.001, "slow": 1.0}
    monkeypatch.setattr(
        bench_timing, "_queue", lambda run, name, count, device: (run(name), (seconds[name], seconds[name]))[1]
    )

    def call(name: str) -> tuple[Any, ...]:
        calls[name] += 1
        return one(1.0)

    actual = bench_timing.measure(call, ["slow", "quick"], 5, torch.device("cpu")).entries
    assert actual["slow"]["microseconds"] == [1e6]
    assert "timed once: much slower" in actual["slow"]["note"]
    assert actual["quick"]["microseconds"] == [1e3] * 5
    assert calls == {"slow": 2, "quick": 5 + 10}
    seconds["slow"] = 0.0031
    actual = bench_timing.measure(call, ["slow", "quick"], 5, torch.device("cpu")).entries
    assert [len(actual[name]["microseconds"]) for name in actual] == [2, 5]


def test_a_backend_is_not_judged_by_one_slow_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a backend prepares its later calls in the second one."""
    queues: list[str] = []

    def queue(run: Any, name: str, count: int, device: Any) -> tuple[float, float]:
        queues.append(name)
        seconds = 0.04 if queues == ["odd"] else 0.001
        return seconds, seconds

    monkeypatch.setattr(bench_timing, "_queue", queue)
    entries = bench_timing.measure(lambda name: one(1.0), ["odd", "quick"], 5, torch.device("cpu")).entries
    assert entries["odd"]["microseconds"] == [1e3] * 5


@pytest.mark.slow
def test_the_data_names_skipped_cases_and_the_backend_that_lost_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sweep, "MOST_SCORES", 1)
    monkeypatch.setattr(bench_sweep, "INSTEAD_OF_FLEX", ("sdpa_flash",))
    sweep = Sweep("cpu", ("sdpa_flash", "math", "flex"), 1, everything=False)
    dense = [case for case in QUICK if case.name.startswith("quick full")]
    assert sweep.run(dense, None, lambda record: None)
    forward = sweep.raw["cases"][0]["backends"]
    assert forward["math"]["skipped"].endswith("other backends run this case")
    assert "compiles for seconds" in forward["flex"]["skipped"]
    text = page(Fitting(sweep.raw))
    assert "- math: skipped: all of which it stores; other backends run this case (2 times)" in text

    def lost(*_: Any) -> Any:
        raise bench_timing.DeviceLostError("sdpa_flash: RuntimeError: an illegal memory access")

    monkeypatch.setattr(Sweep, "_timing", lost)
    other: list[SweepCase] = [case for case in QUICK if case.name.startswith("quick causal")]
    with pytest.raises(bench_timing.DeviceLostError):
        sweep.run(other, None, lambda record: None)
    entries = sweep.raw["cases"][-1]["backends"]
    assert entries["sdpa_flash"] == {"failed": "sdpa_flash: RuntimeError: an illegal memory access"}
    assert sweep.run(dense, None, lambda record: pytest.fail("measured again"))
