"""Tests ``attn certify``: planted faults fail the check that is about them, the file, the comparison, and the draws."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("jax")
import torch
from faulty_kernels import faulty, with_result
from frameworks import replaced

from attn_core import SpecError, backends
from attn_core.backends.shared import known_bad
from attn_core.cli.app import app
from attn_core.cli.campaign.draw import Place, structure
from attn_core.cli.campaign.pages import LARGE_PAGES
from attn_core.cli.certify import command, invariance, known_rows
from attn_core.cli.certify.certificate import Certificate, Entry, certificate_path, read, write
from attn_core.cli.certify.check import Check
from attn_core.cli.certify.checks import CHECKS
from attn_core.cli.certify.draw import NOT_ON_PAGES, drawn, fit, paged_spec, simplified
from attn_core.cli.certify.known_rows import refused_calls
from attn_core.cli.certify.regression import compare
from attn_core.cli.certify.run import Job, jobs_of, known_bad_entry, run_job, run_jobs
from attn_core.cli.certify.standing import standing_of
from attn_core.cli.certify.subject import Left, Subject, subjects_of
from attn_core.cli.frameworks import versions
from attn_core.selection import Target, choice

TORCH, JAX = Subject("math", "torch", "cpu"), Subject("math", "jax", "cpu")


def attn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def entry(check: str | Check, subject: Subject = TORCH, draws: int | None = None) -> Entry:
    found = CHECKS[check] if isinstance(check, str) else check
    return run_job(Job(found if draws is None else found._replace(draws=draws), subject), 0, monotonic() + 600)


# Planted faults


def misread(**fields: Any) -> Callable[..., Any]:
    """A forward of ``math`` that sees another spec in causal calls."""
    forward = backends.load("math").forward

    def faulty_forward(spec: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        return forward(replace(spec, **fields) if spec.causal else spec, inputs, *more, **named)

    return faulty_forward


def leaking(results: Any) -> Any:
    """NaN in one place of the output spoils all of it."""
    return (results[0] * 0 + results[0].sum(), *results[1:]) if results[0].isnan().any() else results


class Drifting:
    """Each run adds another multiple of a small number to the output."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, out: Any) -> Any:
        self.runs += 1
        return out * (1 + self.runs * 2.0**-8 if out.dtype in (torch.bfloat16, torch.float16) else 1 + self.runs * 2e-7)


FAULTS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "bounds": ("forward", with_result(0, lambda out: out * 1.02)),
    "pages": ("forward", with_result(0, lambda out: out * 1.02)),
    "nan": ("forward", leaking),
    "repeats": ("forward", with_result(0, Drifting())),
    "frameworks": ("forward", with_result(0, Drifting())),
}


@pytest.mark.parametrize("check", FAULTS)
def test_a_planted_fault_fails_the_check_that_is_about_it(check: str) -> None:
    subject = JAX if check == "frameworks" else TORCH
    assert entry(check, subject, draws=4).result == "passed"
    direction, fault = FAULTS[check]
    with faulty("math", direction, fault):
        wrong = entry(check, subject, draws=4)
    assert wrong.result == "failed" and wrong.reason and wrong.draws >= 1
    assert wrong.repeat.startswith("attn certify --backend math --framework") and f"--check {check}" in wrong.repeat


def test_a_wrong_gradient_fails_the_bounds() -> None:
    with faulty("math", "backward", with_result(1, lambda dk: dk * 1.05)):
        wrong = entry("bounds")
    assert wrong.result == "failed" and wrong.reason.startswith("dk"), wrong


@pytest.mark.parametrize("right", [0, 2])
def test_a_mask_that_is_off_by_one_fails_the_probe(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagonal that shows one key too many, and a window that shows one key too few."""
    fields = {"causal": False, "window": (None, 1)} if right else {"window": (0, 0)}
    with replaced(monkeypatch, backends.load("math"), forward=misread(**fields), shortcut=lambda spec: None):
        wrong = entry("mask")
        assert wrong.result == "failed"
        assert ("seen though hidden" if right else "hidden though visible") in wrong.reason
        command = wrong.repeat.removeprefix("attn ").split()
        again = attn(*command)
        assert again.exit_code == 1 and "though" in again.stdout, "the printed command shows the fault again"
    assert attn(*command).exit_code == 0


def test_a_hidden_key_with_an_effect_fails_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe sees no effect that is the same for every mask, such as a scale of the largest key."""
    forward = backends.load("math").forward

    def scaled(spec: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        out, lse = forward(spec, inputs, *more, **named)
        return out * (1 + 2e-4 * inputs.k.abs().amax()).to(out.dtype), lse

    with replaced(monkeypatch, backends.load("math"), forward=scaled, shortcut=lambda spec: None):
        assert "changes with keys that it does not see" in entry("mask").reason


def test_an_exception_is_a_fault() -> None:
    def breaks(results: Any) -> Any:
        raise RuntimeError("no kernel image")

    with faulty("math", "forward", breaks):
        assert entry("bounds").reason.startswith("raised RuntimeError: no kernel image")


# Invariance claims


def row_by_row(spec: Any, inputs: Any, *more: Any, **named: Any) -> Any:
    """A kernel whose rows depend on nothing but their own visible keys: causal prompts, dense and in pages."""
    q = inputs.q if spec.packed else inputs.q.flatten(0, 1)
    out, lse = torch.zeros(len(q), spec.num_heads, spec.value_dim), torch.zeros(spec.num_heads, len(q))
    first = 0
    for k, v, count in _prompts(spec, inputs):
        for row in range(count):
            seen = slice(0, len(k) - count + row + 1)
            for head in range(spec.num_heads):
                keys, values = (part[seen, head // spec.group_size].float() for part in (k, v))
                scores = (keys * q[first + row, head].float()).sum(-1) * spec.scale
                weights = (scores - scores.max()).exp()
                out[first + row, head] = (weights[:, None] * values).sum(0) / weights.sum()
                lse[head, first + row] = scores.max() + weights.sum().log()
        first += count
    shaped = lse if spec.packed else lse.unflatten(1, (spec.batch, -1)).swapaxes(0, 1).contiguous()
    return out.reshape(spec.out_shape).to(q.dtype), shaped.to(getattr(torch, spec.lse_dtype))


def _prompts(spec: Any, inputs: Any) -> Any:
    if spec.paged is None:
        yield from ((inputs.k[row], inputs.v[row], spec.q_len) for row in range(spec.batch))
        return
    counts = inputs.cu_seqlens_q.diff().tolist()
    for row, (length, count) in enumerate(zip(inputs.seq_lens.tolist(), counts, strict=True)):
        places = torch.arange(length)
        pages = inputs.block_table[row, places // spec.paged.page_size].long(), places % spec.paged.page_size
        yield inputs.k[pages], inputs.v[pages], count


def depends_on_length(spec: Any, inputs: Any, *more: Any, **named: Any) -> Any:
    """As a kernel that splits the keys of few queries."""
    out, lse = row_by_row(spec, inputs)
    return out, lse + (1e-6 if spec.q_len < 5 else 0)


PLAIN = {"window": (None, None), "softcap": None, "sinks": False, "dtype": "float32"}


def claimed(kind: str, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The check as if ``math`` claimed a kind of invariance."""
    monkeypatch.setattr(invariance, "requested", lambda spec, kind: spec)
    check = CHECKS[kind]
    if kind == "batch":
        return check._replace(excludes=lambda subject: None)
    adapt = check.adapt
    return check._replace(excludes=lambda _: None, adapt=lambda subject, spec: replace(adapt(subject, spec), **PLAIN))


def test_a_split_that_depends_on_the_length_fails_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    check, module = claimed("prefix", monkeypatch), backends.load("math")
    others = {"shortcut": lambda spec: None, "paged_shortcut": lambda spec: lambda *tensors: None}
    with replaced(monkeypatch, module, forward=row_by_row, **others):
        found = entry(check, draws=2)
        assert (found.result, found.draws) == ("passed", 2), found
    with replaced(monkeypatch, module, forward=depends_on_length, **others):
        found = entry(check, draws=3)
        assert found.result == "failed" and "differ from the whole prompt: lse" in found.reason, found


def test_a_result_that_depends_on_the_batch_fails() -> None:
    assert entry("batch", draws=6).result == "passed"
    with faulty("math", "forward", with_result(0, lambda out: out * (1 + 1e-6 * len(out)))):
        found = entry("batch", draws=6)
    assert found.result == "failed" and "differs" in found.reason


def test_a_result_that_depends_on_the_padding_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: all rows of a call have other bits if they are longer."""
    check, module = CHECKS["batch"]._replace(packed=False), backends.load("math")
    honest = module.forward

    def depends_on_padding(spec: Any, inputs: Any) -> Any:
        out, lse = honest(spec, inputs)
        return out * (1 + 1e-6 * spec.kv_len), lse

    with replaced(monkeypatch, module, forward=depends_on_padding):
        found = entry(check, draws=8)
    assert found.result == "failed" and "with padding differs" in found.reason


def test_without_claims_invariance_is_not_run() -> None:
    if getattr(TORCH.claims, "invariant", ()):
        pytest.skip("math claims invariance")
    assert (entry("batch").result, entry("prefix").reason) == ("not run", "claims no prefix invariance")


# Known-bad kernels


def test_every_refusing_row_has_a_call_on_every_backend_and_device() -> None:
    expected = {(row.name, name) for row in known_bad.rows() if row.handling == "refused" for name in row.backends}
    assert {(each.row.name, each.backend) for each in refused_calls()} == expected
    for each in refused_calls():
        assert known_bad.includes(each.row.versions, each.version)


def test_a_row_that_refuses_nothing_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_bad_entry().result == "passed" and known_bad_entry().draws >= 18
    monkeypatch.setattr(known_bad, "refusals", lambda *arguments: ())
    wrong = known_bad_entry()
    assert wrong.result == "failed" and "does not refuse" in wrong.reason


# Draws


def on_sm90() -> list[str]:
    """The backends of torch on a Hopper GPU, as a plan of this machine."""
    modules: dict[str, Any] = {name: backends.load(name, "cuda") for name in backends.names()}
    return [name for name, module in modules.items() if module.FORWARD.runs_on("sm90")]


def reads_pages_alone(name: str) -> bool:
    return backends.reads_pages_alone(backends.load(name, "cuda"))


@pytest.mark.parametrize("name", [name for name in on_sm90() if not reads_pages_alone(name)])
def test_every_backend_gets_calls_that_it_takes(name: str) -> None:
    """Also those with few claims: planned for a GPU, which this test does not need."""
    target = Target(backends.load(name, "cuda").FRAMEWORK, "sm90")
    for number in range(8):
        spec, lengths = structure(Place(0, number, number), "cuda")
        call = simplified((replace(spec, dropout=0.0), lengths), lambda call: choice.refusals(name, call[0], target))
        assert not isinstance(call, str), f"{name}: {call}"
        assert (call[0].documents is None) == (call[1] is None)


@pytest.mark.parametrize("name", [name for name in on_sm90() if backends.load(name, "cuda").FORWARD.paged])
def test_every_backend_with_pages_gets_calls_that_it_takes(name: str) -> None:
    target, taken = Target(backends.load(name, "cuda").FRAMEWORK, "sm90"), 0
    for number in range(8):
        spec, lengths = structure(Place(0, number, number), "cuda", packed=True)
        spec, seed = replace(spec, **{"dropout": 0.0} | NOT_ON_PAGES), number + LARGE_PAGES * (number % 2)

        def refusals(call: Any, seed: int = seed) -> tuple[str, ...]:
            return ("packed",) if call[1] is None else choice.refusals(name, paged_spec(*call, seed), target)

        taken += not isinstance(simplified((spec, lengths), refusals), str)
    assert taken >= 3


def test_a_draw_is_the_same_every_time_and_another_seed_gives_others() -> None:
    def draws(seed: int) -> list[Any]:
        return [drawn(TORCH, seed, number, lambda spec: spec, lambda spec: True) for number in range(5)]

    assert draws(0) == draws(0) != draws(1)


def test_time_that_is_over_is_said() -> None:
    found = list(run_jobs(jobs_of([TORCH], ("bounds", "mask")), 0, 0.0))
    assert [each.result for each in found] == ["not run"] * 2 and "no time was left" in found[0].reason


def test_backends_that_do_not_run_here_are_named_with_reasons() -> None:
    subjects, left = subjects_of({"torch": "cpu", "jax": "cpu"})
    assert {str(each) for each in subjects} >= {"math in torch", "sdpa_flash in jax", "jax_xla in jax"}
    assert dict(left)["flash4 in torch"] == "no kernel for cpu"
    assert dict(left)["jax_xla in torch"] == "runs in JAX only"
    assert len(subjects) + len(left) == 2 * len(backends.names())


# The file


def certificate(*entries: Entry, **changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        **{"date": "2026-11-27 20:00 UTC", "seed": 0, "minutes": 1.0, "seconds": 2.5, "devices": {"torch": "cpu"}},
        **{"device_name": "a processor", "cpu_capability": "AVX2", "versions": {"torch": "2.13.0", "jax": None}},
        **{"backends": (), "checks": (), "known_bad": (), "not_run": (Left("dropout", "seeds"),)},
    }
    return Certificate(**fields | {"entries": entries} | changes)


PASSED = Entry(check="mask", backend="math", framework="torch", device="cpu", result="passed", draws=3, planned=3)
FAILED = replace(PASSED, check="bounds", result="failed", worst=1.5, reason="out", repeat="attn certify")


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write(certificate(PASSED, FAILED), path)
    assert read(path) == certificate(PASSED, FAILED)
    assert (read(path).count("passed"), read(path).count("failed"), read(path).device) == (1, 1, "cpu")


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda raw: [raw], "expected a file written by"),
    "another format": (lambda raw: raw | {"format": 2}, "format=2: expected 1"),
    "a format that is true": (lambda raw: raw | {"format": True}, "format=True: expected 1"),
    "a missing field": (lambda raw: {k: v for k, v in raw.items() if k != "seed"}, "seed: missing"),
    "an unknown field": (lambda raw: raw | {"more": 1}, "more: unknown field"),
    "another type": (lambda raw: raw | {"seed": "0"}, "seed: expected int, got str"),
    "an unknown result": (
        lambda raw: raw | {"entries": [raw["entries"][0] | {"result": "fine"}]},
        "entries[0]: result='fine': expected one of passed, failed, not run",
    ),
    "an entry that is none": (lambda raw: raw | {"entries": [1]}, "entries[0]: expected an object, got int"),
    "no device": (lambda raw: raw | {"devices": {}}, "devices: expected the device"),
    "a version that is a number": (lambda raw: raw | {"versions": {"torch": 2}}, "versions: an item: expected str"),
    "an edit": (lambda raw: raw | {"seed": 1}, "checksum: the content was changed"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_certificate_gives_one_clear_error(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write(certificate(PASSED), path)
    change, words = DAMAGES[damage]
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(SpecError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: ") and words in str(error.value) and "\n" not in str(error.value)
    done = attn("certify", "--check", "known-bad", "--against", str(path))
    assert done.exit_code == 2 and done.stdout == ""


# The comparison


def test_a_regression_is_a_check_that_passes_no_more() -> None:
    before = certificate(PASSED, FAILED, replace(PASSED, check="nan"), replace(PASSED, check="repeats"))
    lost = replace(PASSED, check="repeats", result="not run", reason="claims none")
    now = certificate(replace(PASSED, result="failed", reason="off"), replace(FAILED, result="passed"), lost)
    compared = compare(before, now)
    assert compared.regressions == (
        "mask of math in torch: passed, and fails now: off",
        "nan of math in torch: passed, and is no longer run",
        "repeats of math in torch: passed, and is no longer run: claims none",
    )
    assert compared.mended == ("bounds of math in torch: passes now",)
    assert compare(before, before).regressions == ()


def test_a_part_is_compared_with_its_part() -> None:
    before = certificate(PASSED, replace(PASSED, backend="flex"))
    assert compare(before, certificate(PASSED, backends=("math",))).regressions == ()
    before = certificate(PASSED, replace(PASSED, backend="flex"), replace(PASSED, framework="jax"))
    assert compare(before, certificate(checks=("nan",))).regressions == ()
    assert len(compare(before, certificate()).regressions) == 3, "jax is no longer installed"
    installed = {"versions": {"torch": "2.13.0", "jax": "0.10.2"}}
    assert len(compare(before, certificate(**installed)).regressions) == 2, "the run was about torch"


def test_changed_versions_are_listed() -> None:
    now = certificate(versions={"torch": "2.14.0", "triton": "3.7"}, device_name="another", seed=3)
    assert compare(certificate(), now).versions == (
        "torch: 2.13.0 -> 2.14.0",
        "triton: none -> 3.7",
        "device: a processor -> another",
        "seed: 0 -> 3",
    )
    with pytest.raises(SpecError, match=r"--against: it is about sm90, this run about cpu"):
        compare(certificate(devices={"torch": "sm90"}), certificate())


# The command


def test_the_command_writes_compares_and_fails_on_a_regression(tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("new/first.json", "second.json"))
    options = ("certify", "--backend", "math", "--framework", "torch", "--check", "repeats", "--json")
    done = attn(*options, first)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("OK: all 1 checks that ran passed. torch ")
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "/" not in line)
    written = read(Path(first))
    assert [each.draws for each in written.entries] == [12] and written.cpu_capability
    with faulty("math", "forward", with_result(0, Drifting())):
        done = attn(*options, second, "--against", first)
    assert done.exit_code == 1
    words = " ".join(done.stdout.split())
    assert "FAILED: 1 of 1 checks." in words and "Worse: repeats of math in torch: passed, and fails now" in words


def test_a_whole_run_is_kept_in_the_users_folder_and_doctor_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(command, "subjects_of", lambda devices, names: ([TORCH], []))
    assert standing_of("cpu", versions()) is None
    done = attn("certify", "--device", "cpu", "--minutes", "0.02")
    assert done.exit_code == 0, done.output
    path = certificate_path("cpu")
    assert path.parent == tmp_path / "attn-core" and f"wrote {path}" in done.stdout
    standing = standing_of("cpu", versions())
    assert standing is not None and standing.changed == () and standing.failed == 0 and standing.passed >= 2
    assert str(standing).endswith("and nothing has changed since") and torch.__version__ in str(standing)
    stale = standing_of("cpu", versions() | {"torch": "9.9.9"})
    assert stale is not None and stale.changed == (f"torch: {torch.__version__} -> 9.9.9",)
    assert "run attn certify again" in str(stale)
    path.write_text("{")
    damaged = standing_of("cpu", versions())
    assert damaged is not None and str(damaged).startswith("cannot be read: ")


def test_a_run_without_any_check_is_no_success() -> None:
    done = attn("certify", "--backend", "flash4", "--device", "cpu", "--check", "mask")
    assert done.exit_code == 1 and done.stdout.startswith("NOTHING RAN. ")
    assert "no kernel for cpu (flash4)" in done.stdout


def test_a_part_is_not_kept_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = attn("certify", "--check", known_rows.NAME)
    assert done.exit_code == 0 and "nothing was written" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "mathh"],
        ["--framework", "tf"],
        ["--check", "all"],
        ["--device", "h100"],
        ["--against", "missing.json"],
        ["--json", "/proc/no/certificate.json"],
    ],
    ids=" ".join,
)
def test_invalid_options_are_one_error_before_anything_runs(options: list[str]) -> None:
    done = attn("certify", *options)
    assert done.exit_code == 2 and done.stderr.startswith("attn: ") and done.stdout == ""


@pytest.mark.parametrize("name", CHECKS)
def test_drawn_documents_fit_their_spec(name: str) -> None:
    """A check that makes the keys those of the queries kept keys of other lengths, longer than max_len_k."""
    check, subject, packed = CHECKS[name], Subject("math", "torch", "cpu"), 0
    for seed, number in product(range(4), range(0, 12, 2)):
        case = drawn(subject, seed, number, partial(check.adapt, subject), check.fits, paged=check.paged)
        if not isinstance(case, str) and case.lengths is not None:
            assert fit(case.spec, case.lengths), (seed, number, case)
            packed += 1
    assert packed
