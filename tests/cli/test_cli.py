"""Tests the command line: the output of each command, and its exit code."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import attn_core
from attn_core.cli import demo as demo_command
from attn_core.cli import in_torch, mask, trial
from attn_core.cli.app import app
from attn_core.cli.spec_options import SpecOptions
from attn_core.selection import Target

WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def attn(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env=WIDE)


def test_version_prints_the_version() -> None:
    assert attn("--version").stdout == f"attn-core {attn_core.__version__}\n"


COMMANDS = ["doctor", "explain", "compare", "bench", "mask", "context-plan", "support", "demo", "serve-demo"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    done = attn(command, "--help")
    assert done.exit_code == 0, done.output


# explain


def test_explain_prints_the_selection() -> None:
    arguments = ["--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--softcap", "50", "--causal", "--backward"]
    done = attn("explain", *arguments, "--device", "sm90", "--assume-installed")
    spec = SpecOptions(heads=32, kv_heads=8, head_dim=128, softcap=50.0, causal=True, backward=True).spec("sm90")
    selection = attn_core.explain(spec, Target("torch", "sm90"))
    assert done.stdout == f"{selection}\n(every backend is assumed to be installed)\n"
    assert done.exit_code == (0 if selection.backend else 1)


def test_explain_of_a_named_backend_prints_its_reasons() -> None:
    done = attn("explain", "--backend", "sdpa_flash", "--softcap", "50", "--assume-installed")
    assert done.exit_code == 1
    assert "softcap=50.0: the aten CPU flash kernel has none" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--window", "5"], "window=5: expected causal=True with an int"),
        (["--window", "x"], "--window='x': expected W, or LEFT,RIGHT such as 5,0 or none,3"),
        (["--kv-heads", "3"], "k: expected kv heads that divide the 8 query heads, got 3"),
        (["--softcap", "0"], "softcap=0.0: expected a finite number above 0"),
        (["--dtype", "int8"], "got int8"),
        (["--alignment", "left"], "alignment='left'"),
        (["--backend", "flsh3"], "backend='flsh3': unknown backend; did you mean flash3"),
        (["--device", "tpu"], "--device='tpu': expected cpu, or a compute capability"),
        (["--framework", "tf"], "--framework='tf': expected torch or jax"),
        (["--lengths", "3,x"], "--lengths='3,x': expected whole numbers"),
        (["--lengths", "3", "--documents", "2"], "--documents and --lengths: expected only one"),
        (["--lengths", "3,4", "--q-len", "9"], "--q-len=9: expected the documents' 7 tokens"),
        (["--cu-seqlens", "3,4"], "expected to start at 0, got 3"),
        (["--cu-seqlens", "0,3000000000"], "--cu-seqlens=0,3000000000: expected offsets of at most 2147483647"),
        (["--kv-lengths", "3,4"], "--kv-lengths: expected --lengths as well"),
        (["--documents", "0"], "--documents=0: expected at least 1"),
    ],
)
def test_bad_options_are_named_and_exit_with_2(arguments: list[str], text: str) -> None:
    done = attn("explain", "--assume-installed", *arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert "Traceback" not in done.output


# Options become fields of the spec


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {"q_len": 128, "kv_len": 128, "num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "value_dim": 64}),
        ({"q_len": 7, "kv_len": 11, "value_dim": 32}, {"q_len": 7, "kv_len": 11, "value_dim": 32}),
        ({"window": "3", "causal": True}, {"window": (2, 0)}),
        ({"window": "none,3"}, {"window": (None, 3)}),
        ({"window": "5,"}, {"window": (5, None)}),
        ({"mask": True, "batch": 3, "q_len": 2}, {"mask_shape": (3, 1, 2, 2)}),
        ({"bias": True, "q_len": 2}, {"bias_shape": (1, 8, 2, 2)}),
        ({"alibi": True, "sinks": True}, {"alibi_shape": (8,), "sinks": True}),
        ({"lengths": "3,0,5"}, {"q_len": 8, "kv_len": 8, "documents": 3, "max_len_q": 5, "max_len_k": 5}),
        ({"lengths": "3,4", "kv_lengths": "5,6"}, {"q_len": 7, "kv_len": 11, "documents": 2, "max_len_k": 6}),
        ({"cu_seqlens": "0,3,7"}, {"q_len": 7, "documents": 2, "max_len_q": 4}),
        ({"documents": 3, "q_len": 11, "kv_len": 13}, {"q_len": 11, "kv_len": 13, "documents": 3, "max_len_k": 5}),
        ({"backward": True, "return_lse": True, "dropout": 0.5}, {"needs_backward": True, "dropout": 0.5}),
    ],
)
def test_options_become_fields_of_the_spec(options: dict, fields: dict) -> None:
    spec = SpecOptions(**options).spec()
    assert {name: getattr(spec, name) for name in fields} == fields


def test_every_field_of_the_spec_has_an_option() -> None:
    elsewhere = {"max_len_q": "lengths", "max_len_k": "kv_lengths", "bias_gradient": None, "bias_dtype": None}
    elsewhere["paged"] = None  # fields of explain_paged, which each frontend has
    elsewhere["partial"] = None  # fields of the tiles that context-plan shows, never of a user's call
    renamed = {
        **{"num_heads": "heads", "num_kv_heads": "kv_heads", "mask_shape": "mask", "bias_shape": "bias"},
        **{"alibi_shape": "alibi", "needs_backward": "backward"},
    }
    for name in attn_core.AttentionSpec.__dataclass_fields__:
        option = elsewhere.get(name, renamed.get(name, name))
        assert option is None or option in SpecOptions.__dataclass_fields__, name


# mask


def test_mask_draws_documents() -> None:
    done = attn("mask", "--lengths", "2,3", "--causal")
    drawn = [line.split()[1:] for line in done.stdout.splitlines()[1:6]]
    assert ["".join(line) for line in drawn] == ["■····", "■■···", "··■··", "··■■·", "··■■■"]
    assert done.exit_code == 0


def test_mask_draws_large_masks_in_blocks() -> None:
    seen = np.tril(np.ones((100, 100), bool))
    drawn = mask.draw(seen, columns=24).splitlines()  # room for 10 signs
    assert drawn[0].split()[1:] == ["▪", *"·········"]
    assert drawn[9].split()[1:] == [*"■■■■■■■■■", "▪"]
    assert "10 x 10" in drawn[-1]
    assert "nothing to draw" in mask.draw(np.ones((3, 0), bool))


def test_mask_writes_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = attn("mask", "--lengths", "3,4,5", "--png", str(tmp_path / "mask.png"))
    assert done.exit_code == 0, done.output
    assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--mask"], ["--q-len", "100000"]])
def test_mask_refuses_calls_that_it_cannot_draw(arguments: list[str]) -> None:
    assert attn("mask", *arguments).exit_code == 2


# compare runs kernels


def test_compare_prints_errors_bits_and_times(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    arguments = ["--q-len", "13", "--heads", "6", "--kv-heads", "3", "--causal", "--gradients", "--repeats", "1"]
    done = attn("compare", *arguments, "--json", "--plot", str(tmp_path / "compare.png"))
    assert done.exit_code == 0, done.output
    actual = json.loads(done.stdout)
    ran = [row for row in actual["rows"] if "milliseconds" in row]
    assert {row["framework"] for row in ran} == {"torch", "jax"}
    for row in ran:
        assert row["ok"] and set(row["quantities"]) == {"out", "dq", "dk", "dv"}, row
    assert actual["bit_equal"]["sdpa_flash"] is True
    assert actual["bit_equal"]["math"] is True
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "3,0,5", "--kv-lengths", "4,2,5"], ["--mask", "--bias", "--alibi", "--sinks", "--return-lse"]],
    ids=["packed", "added"],
)
def test_compare_takes_every_kind_of_tensor(arguments: list[str]) -> None:
    pytest.importorskip("torch")
    done = attn("compare", "--heads", "2", "--q-len" if "--mask" in arguments else "--batch", "1", *arguments)
    assert done.exit_code == 0, done.output
    assert "math" in done.stdout and "refused" in done.stdout


def test_compare_reports_a_wrong_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    right = in_torch.run

    def wrong(*arguments, **keywords):
        outcome = right(*arguments, **keywords)
        return outcome._replace(arrays={name: 1.01 * array for name, array in outcome.arrays.items()})

    monkeypatch.setitem(attn_core.cli.comparison.RUN, "torch", wrong)
    done = attn("compare", "--q-len", "5", "--repeats", "1")
    assert done.exit_code == 1
    assert "WRONG" in done.stdout and "differ" in done.stdout


@pytest.mark.parametrize(
    "arguments", [["--dropout", "0.5"], ["--device", "sm10"], ["--device", "gpu"], ["--window", "2"]]
)
def test_compare_refuses_calls_that_it_cannot_run(arguments: list[str]) -> None:
    assert attn("compare", *arguments).exit_code == 2


def test_trial_values_are_exact_in_the_dtype() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.random.default_rng(0).standard_normal(10_000)
    expected = values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    assert trial.rounded(values, "bfloat16").tobytes() == expected.tobytes()


# support and demo


@pytest.mark.parametrize("command", [["support"], ["support", "--devices"]], ids=" ".join)
def test_support_writes_and_checks_the_page(command: list[str], tmp_path: Path) -> None:
    page = tmp_path / "support.md"
    stale = attn(*command, "--check", str(page))
    assert stale.exit_code == 1 and f"run: attn {' '.join(command)} --write" in stale.stderr
    assert attn(*command, "--write", str(page)).exit_code == 0
    assert attn(*command, "--check", str(page)).exit_code == 0
    assert page.read_text(encoding="utf-8") in attn(*command).stdout
    page.write_text(page.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert attn(*command, "--check", str(page)).exit_code == 1


EXAMPLES = pytest.mark.parametrize(
    ("command", "module"), [("demo", "examples.smollm2"), ("serve-demo", "examples.serving")]
)


@EXAMPLES
def test_a_demo_runs_its_example(monkeypatch: pytest.MonkeyPatch, command: str, module: str) -> None:
    commands = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command[1:])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(demo_command, "find_spec", lambda name: object())
    monkeypatch.setattr(demo_command.subprocess, "run", run)
    assert attn(command, "--short").exit_code == 3
    assert attn(command).exit_code == 3
    assert commands == [["-m", module, "--short"], ["-m", module]]


@EXAMPLES
def test_a_demo_without_its_example_says_where_to_get_it(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None)
    done = attn(command)
    assert done.exit_code == 1
    assert f"make {command}" in done.stderr and f"python -m {module}" in done.stderr
