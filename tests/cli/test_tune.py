"""Tests ``attn tune`` on the CPU from end to end, and that a new process follows its table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn_core.cli import tune as command
from attn_core.cli.app import app
from attn_core.selection import cross_validation
from attn_core.selection.sweep import QUICK
from attn_core.selection.tables import table_in_force, user_path

pytest.importorskip("torch")


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
    monkeypatch.setattr(command, "random_calls", lambda seed, kind: iter(QUICK))
    monkeypatch.setattr(cross_validation, "FEWEST", 2)
    done = attn("tune", "--device", "cpu", "--minutes", "5")
    assert done.exit_code == 0, done.output
    path = folder / "attn-core/torch-cpu.json"
    assert f"wrote {path}" in done.stdout.replace("\n", " ") and "| predicted order, unseen calls |" in done.stdout
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
    monkeypatch.setattr(command, "random_calls", lambda seed, kind: iter(QUICK[:1]))
    monkeypatch.setattr(command, "shipped_table", lambda framework, device: None)
    done = attn("tune", "--device", "cpu", "--minutes", "2")
    assert done.exit_code == 1
    assert "are too few; try --minutes 10" in done.stderr
    assert not user_path("torch", "cpu").exists()


def test_tune_stops_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = chain.from_iterable(repeat(QUICK[:1]))
    monkeypatch.setattr(command, "random_calls", lambda seed, kind: endless)
    monkeypatch.setattr(command, "shipped_table", lambda framework, device: None)
    assert attn("tune", "--device", "cpu", "--minutes", "0.01").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "npu"], "--device='npu': no such device; did you mean xpu? Expected one of"),
        (["--framework", "numpy"], "--framework='numpy_': expected torch or jax"),
        (
            ["--framework", "jax", "--device", "sm90"],
            "--device=sm90: expected a device of this machine that can be timed: cpu",
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
    monkeypatch.setattr("attn_core.cli.findings._files", lambda: [])
    monkeypatch.setattr("attn_core.cli.findings._devices", lambda framework: ["cpu", "sm90", "sm80"])
    tables = json.loads(attn("doctor", "--json").stdout)["tables"]
    assert "calls measured on NVIDIA H200" in tables["torch on sm90"]
    assert tables["torch on sm80"] == "the static order: nothing was measured"
    assert "choice in torch on sm90" in attn("doctor").stdout
