"""Tests ``attn doctor``: the report, its JSON, its exit code, and that it fits 80 columns."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from attn_core import AttentionSpec, backends
from attn_core.backends.support import Build
from attn_core.cli import in_jax, in_torch
from attn_core.cli.advice import Machine, advise, problems
from attn_core.cli.app import app
from attn_core.cli.certify.calls import faults_of, subjects_on
from attn_core.cli.compare import Row
from attn_core.cli.doctor import Findings, State, examine, report
from attn_core.selection import Target
from attn_core.selection.choice import refusals

pytest.importorskip("torch")
pytest.importorskip("jax")

MODULE = "attn_core.cli.doctor"
KEYS = {
    *("healthy", "runs", "versions", "devices", "machine", "processor", "tables", "bridge"),
    "certificate",
    *("backends", "checks"),
    *("broken", "faults", "problems", "advice"),
}


def attn(*arguments: str, columns: int = 80):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(columns)})


@pytest.fixture(scope="module")
def findings() -> Findings:
    return examine(Console(quiet=True))


def on(findings: Findings, machine: Machine) -> Findings:
    """The findings as if this process ran on a machine whose GPU the frameworks do not use."""
    return replace(findings, machine=machine, problems=problems(machine), advice=advise(machine))


def text(findings: Findings, monkeypatch: pytest.MonkeyPatch, *, everything: bool = False) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    return "\n".join(report(findings, everything)).splitlines()


def test_json_is_complete(findings: Findings) -> None:
    done = attn("doctor", "--json")
    assert done.exit_code == (0 if findings.healthy else 1), done.output
    actual = json.loads(done.stdout)
    assert set(actual) == KEYS
    assert actual["versions"]["numpy"] == np.__version__
    assert {state["name"] for state in actual["backends"].values()} == set(backends.names())
    for name, state in actual["backends"].items():
        assert (state["version"] is None) != (state["reason"] is None), name
    assert actual["runs"] == {framework: findings.running(framework) for framework in findings.devices}
    assert set(actual["runs"]["torch"]) <= set(backends.names()) and actual["runs"]["torch"]
    for row in actual["checks"]:
        assert row["reasons"] or row["ok"], row
        assert not row["failed"], row


def test_the_report_answers_first_and_names_every_backend() -> None:
    done = attn("doctor")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("OK: all backends that run on this machine computed right numbers.\ntorch runs ")
    for name in backends.names():
        assert name in done.stdout
    titles = ["This machine", "Right", "Install next", "Not here"]
    places = [done.stdout.index(f"\n\n{title}") for title in titles]
    assert places == sorted(places)
    assert "ModuleNotFoundError" not in done.stdout and "\x1b" not in done.stdout


def test_all_gives_every_reason() -> None:
    printed = " ".join(attn("doctor", "--all").stdout.split())
    assert printed.count("never run on a GPU by this project") == 4
    assert "(needs xformers>=0.0.29)" in printed


MACHINES = [
    Machine(device="sm90", gpus=("NVIDIA H100 80GB HBM3",) * 8, packages={"torch": "2.13.0"}, torch_cuda=(13, 0)),
    Machine(
        device="sm90", packages={"torch": "2.13.0+cpu", "jax": "0.10.2", "xformers": "0.0.35", "flash-attn-4": "4"}
    ),
    Machine(device="sm80", packages={"torch": "2.13.0", "xformers": "0.0.35"}, torch_cuda=(13, 0), driver="575.57"),
    Machine(device="gfx942", packages={"torch": "2.13.0"}, torch_hip=True),
    Machine(device="sm70"),
    Machine(device="tpu", packages={"jax": "0.11"}),
    Machine(device="cpu"),
]


@pytest.mark.parametrize("everything", [False, True], ids=["short", "all"])
@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.device)
def test_lines_fit_80_columns(
    findings: Findings, machine: Machine, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in text(on(findings, machine), monkeypatch, everything=everything):
        assert len(line) <= 80, line


def test_the_report_shows_problems_and_commands(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text(on(findings, MACHINES[1]), monkeypatch)
    assert lines[0].startswith("CPU ONLY: all backends that run here were right")
    together = "\n".join(lines)
    for problem in problems(MACHINES[1]):
        assert problem.text in " ".join(together.split())
        assert all(f"       {command}\n" in together for command in problem.commands)
    assert "for sm90, which no framework uses here: ffpa, flash2" in together


GPU = Target("torch", "sm90", builds=(("sdpa_cudnn", Build("cuDNN 9.19.0", version=(9, 19, 0))),))


def test_the_report_lists_known_faults_of_installed_kernels(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert findings.faults == (), "no row is about a kernel of this test's machine"
    missing = tuple((name, "not here") for name in backends.names() if name not in ("sdpa_cudnn", "math"))
    monkeypatch.setattr(Target, "here", lambda framework, device: targets[device])
    targets = {"sm90": replace(GPU, unavailable=missing), "cpu": Target("torch", "cpu")}
    faults = faults_of(subjects_on([("torch", "sm90"), ("torch", "cpu")]))
    assert [fault.name for fault in faults] == ["cudnn-nan-dq", "cudnn-nan-one-query"]
    assert all(fault.backends == ("sdpa_cudnn",) for fault in faults)
    report = " ".join(" ".join(text(replace(findings, faults=faults), monkeypatch)).split())
    for fault in faults:
        assert fault.symptom in report and fault.link in report
    assert "Known faults" not in " ".join(text(replace(findings, faults=()), monkeypatch))


def test_faults_of_torch_leave_out_the_kernels_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "here", lambda framework, device: replace(GPU, framework=framework))
    faults = faults_of(subjects_on([("torch", "sm90")]))
    assert {name for fault in faults for name in fault.backends} >= {"sdpa_flash", "sdpa_cudnn"}
    assert not any("jax_cudnn" in fault.backends for fault in faults)
    both = faults_of(subjects_on([("torch", "sm90"), ("jax", "sm90")]))
    assert [fault.backends for fault in both if fault.name == "cudnn-nan-dq"] == [("sdpa_cudnn", "jax_cudnn")]


def test_a_long_command_continues_after_a_backslash(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = text(on(findings, Machine(device="sm70")), monkeypatch)
    first = lines.index("       pip install 'torch>=2.11' \\")
    assert lines[first + 1] == "         --index-url https://download.pytorch.org/whl/cu126"


def test_a_tpu_needs_jax_alone(findings: Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "  Nothing: no package would be used for tpu." in text(on(findings, MACHINES[5]), monkeypatch)
    lines = text(on(findings, Machine(device="tpu")), monkeypatch)
    assert "  1. jax. XLA's operations, which run on every TPU." in lines


def test_a_wrong_backend_is_named_first_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    right = in_torch.run

    def wrong(*arguments, **keywords):
        return {name: 1.01 * array for name, array in right(*arguments, **keywords).items()}

    monkeypatch.setattr(in_torch, "run", wrong)
    monkeypatch.setattr(f"{MODULE}._files", lambda: [("math", "math", "cpu"), ("jax_xla", "jax_xla", "cpu")])
    done = attn("doctor")
    assert done.exit_code == 1
    assert done.stdout.startswith("WRONG: the check failed for math.\n")
    assert "in torch on cpu: error " in done.stdout


def test_a_backend_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments, **keywords):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(in_jax, "run", fail)
    monkeypatch.setattr(f"{MODULE}._files", lambda: [("jax_xla", "jax_xla", "cpu")])
    done = attn("doctor")
    assert done.exit_code == 1
    assert "WRONG: the check failed for jax_xla." in done.stdout
    assert "raised RuntimeError: out of luck" in done.stdout


def test_nothing_that_runs_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.installed", lambda: ())
    done = attn("doctor")
    assert done.exit_code == 1
    assert done.stdout.startswith("NOTHING RUNS: neither torch nor JAX works here.\n")


def test_a_framework_that_fails_to_import_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(framework: str) -> list[str]:
        if framework == "jax":
            raise ImportError("jaxlib is older than jax")
        return ["cpu"]

    monkeypatch.setattr(f"{MODULE}.devices_of", devices)
    monkeypatch.setattr(f"{MODULE}._files", lambda: [("math", "math", "cpu")])
    done = attn("doctor")
    assert done.exit_code == 1
    assert done.stdout.startswith("BROKEN: installed, but not working: jax.")
    assert "ImportError: jaxlib is older than jax" in done.stdout
    assert json.loads(attn("doctor", "--json").stdout)["broken"] == {"jax": "ImportError: jaxlib is older than jax"}


REASON = "not available: ImportError: undefined symbol"


@pytest.mark.parametrize(
    ("states", "checks", "broken"),
    [
        ({"flash2": REASON}, [], {"flash-attn": REASON}),
        ({"flash2": None}, [], {}),
        ({"flash2": None}, [Row("flash2", "torch", (REASON,), device="sm90")], {"flash-attn": REASON}),
        # One of two variants works, so the package does.
        ({"sage": None, "sage_fp8_cuda": REASON}, [], {}),
        ({"sage": REASON, "sage_fp8_cuda": REASON}, [], {"sageattention": REASON}),
        # A package that is not installed is not broken.
        ({"xformers": REASON}, [], {}),
    ],
    ids=["import", "works", "launch", "one-variant", "all-variants", "absent"],
)
def test_an_installed_package_that_does_not_work_is_broken(
    findings: Findings, states: dict[str, str | None], checks: list[Row], broken: dict[str, str]
) -> None:
    modules = {
        name: State(name, "cuda", False, None if reason else "1.0", reason, here=True)
        for name, reason in states.items()
    }
    versions = findings.versions | {"flash-attn": "2.8.3", "sageattention": "1.0.6"}
    changed = replace(findings, versions=versions, backends=modules, checks=[*findings.right, *checks])
    assert changed.broken == broken
    assert changed.healthy == (not broken)


def test_each_framework_is_checked_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []

    def rows_of(trial, device, names, frameworks):
        ran.extend((framework, device) for framework in frameworks)
        return iter(())

    monkeypatch.setattr(f"{MODULE}.rows_of", rows_of)
    check = examine.__globals__["_check"]
    check("math", "cpu", {"torch": ["cpu", "sm90"], "jax": ["cpu"]})
    check("sdpa_flash", "cpu", {"torch": ["cpu", "sm90"], "jax": ["cpu"]})
    check("jax_xla", "cpu", {"torch": ["cpu"], "jax": ["cpu"]})
    assert ran == [("torch", "sm90"), ("jax", "cpu"), ("torch", "cpu"), ("jax", "cpu"), ("jax", "cpu")]


@pytest.mark.parametrize(
    ("name", "framework", "device", "dtype"),
    [
        ("sdpa_cudnn", "torch", "sm90", None),
        ("jax_cudnn", "jax", "sm90", None),
        ("flash4", "torch", "sm90", None),
        ("math", "torch", "mps", "bfloat16"),
        ("math", "torch", "gfx942", "bfloat16"),
        ("jax_xla", "jax", "tpu", "bfloat16"),
        ("sdpa_efficient", "torch", "sm75", "float16"),
    ],
)
def test_a_backend_is_checked_with_a_call_that_it_takes_in_a_dtype_that_the_device_has(
    name: str, framework: str, device: str, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs: list[AttentionSpec] = []

    def rows_of(trial, device, names, frameworks):
        specs.append(trial.spec)
        return iter(())

    target = Target(framework, device)
    monkeypatch.setattr(f"{MODULE}.rows_of", rows_of)
    monkeypatch.setattr(Target, "here", staticmethod(lambda *_: target))
    kind = "cuda" if device.startswith("sm") else "cpu"
    examine.__globals__["_check"](name, kind, {framework: ["cpu", device]})
    (spec,) = specs
    assert dtype in (None, spec.dtype) and refusals(name, spec, target) == ()
    assert spec.needs_backward or device != "sm90"
