"""Tests ``attn tune`` on the CPU from end to end, and that a new process follows its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from quick_calls import QUICK
from typer.testing import CliRunner

from attn_core import AttentionSpec, backends
from attn_core.cli import tune as command
from attn_core.cli.app import app
from attn_core.selection import Target
from attn_core.selection.tables import plain_model, table_in_force, table_of, user_path
from benchmarks.fit.records import measured_records, read, record_spec

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
CALLS = [(case.spec, case.lengths) for case in QUICK]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    table_in_force.cache_clear()
    yield tmp_path
    table_in_force.cache_clear()


def attn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.mark.slow
def test_tune_writes_a_table_that_new_processes_follow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "grid", lambda device: CALLS)
    monkeypatch.setattr(command, "FEWEST", 2)
    done = attn("tune", "--device", "cpu", "--minutes", "5")
    assert done.exit_code == 0, done.output
    path = folder / "attn-core/torch-cpu.json"
    assert (
        f"wrote {path}" in done.stdout.replace("\n", " ") and "| this table, calls held out of its fit |" in done.stdout
    )
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["calls"] == len(QUICK) and {"math", "sdpa_flash"} <= set(content["models"]["training"])
    explain = [sys.executable, "-m", "attn_core", "explain", "--heads", "2", "--kv-heads", "2", "--head-dim", "8"]
    shown = subprocess.run(
        [*explain, "--q-len", "5", "--kv-len", "5", "--dtype", "float32"],
        **{"env": dict(os.environ), "capture_output": True, "text": True, "check": True},
    ).stdout
    printed = " ".join(shown.split())
    assert f"in the order of predicted times, from {path}: {len(QUICK)} calls measured on " in printed
    assert printed.startswith("selected: ") and ", about " in printed


def test_tune_without_time_for_enough_calls_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "grid", lambda device: CALLS[:1])
    monkeypatch.setattr(command, "able", lambda *_: ("sdpa_flash", "math"))  # flex compiles for seconds
    done = attn("tune", "--device", "cpu", "--minutes", "2")
    assert done.exit_code == 1
    assert "are too few; try --minutes 10" in done.stderr
    assert not user_path("torch", "cpu").exists()


def test_tune_stops_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "grid", lambda device: 10_000 * CALLS[:1])
    monkeypatch.setattr(command, "able", lambda *_: ("sdpa_flash", "math"))
    assert attn("tune", "--device", "cpu", "--minutes", "0.01").exit_code == 1


@pytest.mark.parametrize("device", ["cpu", "sm80", "sm75"])
def test_the_grid_has_calls_of_every_kind_from_its_start(device: str) -> None:
    calls = command.grid(device)
    assert len({(spec, documents) for spec, documents in calls}) == len(calls) > 100
    for part in (calls[: len(calls) // 2], calls):
        specs = [spec for spec, _ in part]
        for name in ("mask_shape", "bias_shape", "alibi_shape", "softcap", "documents"):
            assert {getattr(spec, name) is None for spec in specs} == {True, False}, name
        assert {spec.causal for spec in specs} == {spec.sinks for spec in specs} == {True, False}
        assert any(spec.q_len == 1 for spec in specs) and len({spec.dtype for spec in specs}) == 2
    for spec, documents in calls:
        assert (documents is not None) is spec.packed
        if documents is not None:
            assert (sum(documents), len(documents), max(documents)) == (spec.q_len, spec.documents, spec.max_len_q)


def test_backends_that_compile_or_store_every_score_are_timed_in_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, small, large = ("sdpa_flash", "math", "flex"), CALLS[0][0], replace(CALLS[0][0], q_len=2**14, kv_len=2**14)
    monkeypatch.setattr(command, "draw", lambda *_: None)
    monkeypatch.setattr(command, "timed", lambda call, framework, device, names, *_, **options: dict.fromkeys(names))

    def names(spec: AttentionSpec, number: int, able: tuple[str, ...] = usual) -> list[str]:
        monkeypatch.setattr(command, "able", lambda *_: able)
        return [*command.measured(spec, None, Target("torch", "cpu"), number).entries]

    assert [names(small, number) for number in range(5)] == [[*usual], *[[*usual[:2]]] * 3, [*usual]]
    assert names(large, 0) == ["sdpa_flash", "flex"] and names(large, 1) == ["sdpa_flash"]
    for alone in (("math",), ("flex",)):
        assert names(large, 1, alone) == [*alone]
    assert names(large, 1, ("math", "flex")) == ["math"]


@pytest.mark.slow
def test_a_table_of_few_calls_chooses_well_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an H100: two hundred stored times in place of the grid, the others unseen, and the H200's models to start."""
    monkeypatch.setattr(command, "_processors", lambda target: 132)
    target, cases = Target("torch", "sm90"), []
    for number, record in enumerate(measured_records(read(ROOT / "benchmarks/results/sweep-sm90-h100.json"))):
        entries = {name: entry for name, entry in record["backends"].items() if name in backends.names()}
        cases.append(command.Case(number, record_spec(record), entries))
    measured, others = cases[:200], cases[200:]
    models = command.fitted(measured, target, others[:60])
    for few, mean in ((measured, 1.02), (others, 1.06)):
        for direction, facts in command.costs(few, target, models).items():
            assert facts["geometric mean"] < mean, (direction, facts)
    static = command.costs(others, target, None)
    assert all(facts["geometric mean"] > 1.1 for facts in static.values())
    content = command._table(measured, target, models, {})
    assert json.loads(json.dumps(content)) == content
    for training, named in table_of(content).models.items():
        assert {name: plain_model(model) for name, model in named.items()} == {
            name: plain_model(model) for name, model in models[training].items()
        }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "npu"], "--device='npu': no such device; did you mean xpu? Expected one of"),
        (["--framework", "numpy"], "--framework='numpy_': expected torch or jax"),
        (
            ["--framework", "jax", "--device", "sm90"],
            "--device=sm90: expected a device of this machine; `attn explain --device sm90` works without it",
        ),
    ],
)
def test_bad_options_are_named_and_exit_with_2(arguments: list[str], text: str) -> None:
    done = attn("tune", *(argument.replace("numpy", "numpy_") for argument in arguments))
    assert done.exit_code == 2, done.output
    assert text in done.stderr.replace("\n", " ")


def test_tune_measures_no_gpu_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "device_of", lambda device, framework: device or "sm90")
    done = attn("tune", "--framework", "jax", "--device", "sm90")
    assert done.exit_code == 2
    assert "a GPU's table is measured in torch; use --framework torch" in done.stderr.replace("\n", " ")


def test_doctor_says_which_table_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_core.cli.doctor._files", lambda: [])
    monkeypatch.setattr("attn_core.cli.doctor.devices_of", lambda framework: ["cpu", "sm90", "sm80", "sm89"])
    tables = json.loads(attn("doctor", "--json").stdout)["tables"]
    assert "calls measured on NVIDIA H200" in tables["torch on sm90"]
    assert tables["torch on sm89"] == "the static order: nothing was measured"
    assert tables["torch on sm80"] == "the static order, corrected by published figures: nothing was measured here"
    assert "choice in torch on sm90" in attn("doctor").stdout
