"""Tests ``attn certify``: planted faults fail the check that is about them, the stored calls, and the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("jax")
import torch
from faulty_kernels import faulty, with_result
from frameworks import replaced

from attn_core import SpecError, backends
from attn_core.backends.support import Support
from attn_core.cli.app import app
from attn_core.cli.certify import certificate as module
from attn_core.cli.certify.calls import CALLS, CHECKS, STORED, Form, Subject, accepted, calls_of, subjects_on
from attn_core.cli.certify.certificate import (
    Certificate,
    count,
    read,
    standing_of,
    user_path,
    write,
)
from attn_core.cli.certify.checks import Entry, entry_of
from attn_core.cli.devices import versions
from attn_core.selection import Target

TORCH, JAX = Subject("math", "torch", "cpu"), Subject("math", "jax", "cpu")
ON_A_CPU = (("torch", "cpu"), ("jax", "cpu"))


def attn(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def entry(check: str, *calls: str, subject: Subject = TORCH) -> Entry:
    """The entry of a check, of all its calls or of some."""
    found = calls_of(check)
    return entry_of(check, subject, {name: found[name] for name in calls} or found)


# The claims


EVERYWHERE = {"bounds", "mask", "nan", "repeats"}
JUDGED = {
    "math in torch": EVERYWHERE | {"pages", "batch", "prefix"},
    "math in jax": EVERYWHERE | {"pages", "batch", "prefix", "frameworks"},
    "sdpa_flash in torch": EVERYWHERE | {"pages"},
    "sdpa_flash in jax": EVERYWHERE | {"pages", "frameworks"},
    "jax_xla in jax": EVERYWHERE | {"pages", "batch", "prefix"},
    "flex in torch": EVERYWHERE,
    "flex in jax": EVERYWHERE | {"frameworks"},
}
"""What a certificate of a CPU with torch and JAX says something about: of each backend."""


def taken(check: str, subject: Subject) -> dict[str, Form]:
    """The calls of a check that a backend takes."""
    if check == "frameworks" and (subject.framework == "torch" or backends.load(subject.backend).framework == "jax"):
        return {}
    found = {name: accepted(subject, call) for name, call in calls_of(check).items()}
    return {name: form for name, form in found.items() if isinstance(form, Form)}


def test_every_claim_on_the_cpu_is_judged() -> None:
    subjects = [subject for subject in subjects_on(ON_A_CPU) if subject.missing is None]
    judged = {str(subject): {check for check in CHECKS if taken(check, subject)} for subject in subjects}
    assert {name: checks - judged[name] for name, checks in JUDGED.items() if checks - judged[name]} == {}


def test_a_backend_with_every_claim_takes_every_call() -> None:
    """So a call that no backend takes cannot stand in the list."""
    assert taken("bounds", TORCH).keys() == CALLS.keys() == taken("mask", TORCH).keys()
    assert taken("pages", TORCH).keys() == STORED["pages"].keys()
    assert all(form.spec.needs_backward and form.spec.return_lse for form in taken("bounds", TORCH).values())


FEATURES = {
    **{name: name for name in ("causal", "softcap", "sinks", "packed", "mask_mod", "score_mod", "bias_gradient")},
    **{"mask": "mask_shape", "bias": "bias_shape", "alibi": "alibi_shape", "key_ranges": "key_ranges_shape"},
    "aux_gradients": "aux_gradients",
}
"""Claims of Support, and the field of a spec that uses them."""


def test_every_feature_that_can_be_claimed_has_a_call() -> None:
    assert FEATURES.keys() <= {field.name for field in fields(Support)}
    specs = [form.spec for form in taken("bounds", TORCH).values()]
    for name in FEATURES.values():
        assert any(getattr(spec, name) for spec in specs), name
    assert any(spec.window != (None, None) for spec in specs)
    assert {spec.alignment for spec in specs if spec.q_len != spec.kv_len} == {"bottom_right", "top_left"}
    assert {spec.dtype for spec in specs} == {"float64", "float32", "bfloat16", "float16"}


def on_sm90() -> list[str]:
    """The backends of torch on a Hopper GPU, as a plan of this machine."""
    return [name for name in backends.names() if backends.load(name, "cuda").forward_claims.runs_on("sm90")]


@pytest.mark.sampled
@pytest.mark.parametrize("name", on_sm90())
def test_every_backend_gets_calls_that_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those with few claims: planned for a GPU, which this test does not need."""
    framework = backends.load(name, "cuda").framework
    monkeypatch.setattr(Target, "here", classmethod(lambda cls, framework, device: cls(framework, device)))
    subject = Subject(name, framework, "sm90")
    found = {check: taken(check, subject) for check in CHECKS}
    claims = subject.claims
    claimed = {
        **{"pages": claims.paged, "repeats": claims.deterministic, "frameworks": False},
        **{each: each in claims.invariant and name not in INVARIANT_ON_A_CPU for each in ("batch", "prefix")},
    }
    assert {check for check, calls in found.items() if not calls} == {each for each in claimed if not claimed[each]}
    assert len(found["bounds"]) >= 5


@pytest.mark.parametrize("device", ["sm70", "gfx942", "mps", "xpu", "tpu"])
def test_the_operations_of_a_framework_take_every_call_on_every_device(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Target, "here", classmethod(lambda cls, framework, device: cls(framework, device)))
    subject = Subject("jax_xla", "jax", device) if device == "tpu" else Subject("math", "torch", device)
    assert subject.missing is None
    assert taken("bounds", subject).keys() == CALLS.keys() and taken("pages", subject).keys() == STORED["pages"].keys()


INVARIANT_ON_A_CPU = {"math", "jax_xla"}
"""The backends that refuse every call with ``invariant`` on a GPU."""


def test_backends_that_do_not_run_here_are_named_with_reasons() -> None:
    missing = {str(subject): subject.missing for subject in subjects_on(ON_A_CPU)}
    assert {missing[name] for name in ("math in torch", "sdpa_flash in jax", "jax_xla in jax")} == {None}
    assert (missing["flash4 in torch"], missing["jax_xla in torch"]) == ("no kernel for cpu", "runs in JAX only")
    assert len(missing) == 2 * len(backends.names())


def test_what_a_backend_refuses_is_said() -> None:
    none = entry("pages", subject=Subject("flex", "torch", "cpu"))
    assert none.result == "not run" and all("pages" in why for why in none.refused)
    assert [call for calls in none.refused.values() for call in calls] == list(STORED["pages"])
    found = entry("bounds", "causal", "softcap", subject=Subject("sdpa_flash", "torch", "cpu"))
    assert (found.result, found.draws) == ("passed", 1)
    assert [(calls, "softcap" in why) for why, calls in found.refused.items()] == [(["softcap"], True)]
    alone = entry("frameworks", "causal", subject=Subject("jax_xla", "jax", "cpu"))
    assert (alone.result, alone.refused) == ("not run", {"runs in JAX only": ["causal"]})


# Planted faults


Fault = Callable[[Any, Any, Any], Any]
"""(spec, inputs, results) -> other results."""


@contextmanager
def planted(fault: Fault, direction: str = "forward") -> Iterator[None]:
    """A fault of ``math``, which the shortcut of a forward cannot avoid."""
    record = backends.load("math")
    honest = getattr(record, direction)

    def run(spec: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        return fault(spec, inputs, honest(spec, inputs, *more, **named))

    with replaced(record, **{direction: run, "shortcut": None}):
        yield


def of_result(index: int, change: Callable[[Any], Any]) -> Fault:
    changed = with_result(index, change)
    return lambda spec, inputs, results: changed(results)


def misread(**fields: Any) -> Fault:
    """Causal calls are those of another spec."""
    forward = backends.load("math").forward
    return lambda spec, inputs, results: forward(replace(spec, **fields), inputs) if spec.causal else results


def leaking(spec: Any, inputs: Any, results: Any) -> Any:
    """NaN in one place of the output spoils all of it."""
    return (results[0] * 0 + results[0].sum(), *results[1:]) if results[0].isnan().any() else results


class Drifting:
    """Each run adds another multiple of a small number to the output."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, out: Any) -> Any:
        self.runs += 1
        return out * (1 + self.runs * 2.0**-8 if out.dtype in (torch.bfloat16, torch.float16) else 1 + self.runs * 2e-7)


def misaligned(spec: Any, inputs: Any, results: Any) -> Any:
    return results[0] * (1.1 if inputs.q.data_ptr() % 16 else 1.0), results[1]


def of_the_largest_key(spec: Any, inputs: Any, results: Any) -> Any:
    """The probe sees no effect that is the same for every mask."""
    return results[0] * (1 + 2e-4 * inputs.k.abs().amax()).to(results[0].dtype), results[1]


def by_length(spec: Any, inputs: Any, results: Any) -> Any:
    """As a kernel that splits the keys of few queries."""
    return results[0], results[1] + (1e-6 if spec.q_len < 5 else 0)


def by_padding(spec: Any, inputs: Any, results: Any) -> Any:
    """All rows of a call have other bits if they are longer."""
    return results[0] * (1 + 1e-6 * spec.kv_len), results[1]


def raises(spec: Any, inputs: Any, results: Any) -> Any:
    raise RuntimeError("no kernel image")


class Plant(NamedTuple):
    """A fault, and the check and the calls that must show it.

    Attributes:
        says: a pattern of the reason.
    """

    check: str
    calls: tuple[str, ...]
    fault: Fault
    says: str
    direction: str = "forward"
    subject: Subject = TORCH


PLANTS = {
    "output": Plant("bounds", ("causal",), of_result(0, lambda out: out * 1.02), "^causal: out"),
    "pages": Plant("pages", ("pages of 16",), of_result(0, lambda out: out * 1.02), "^pages of 16: "),
    "nan": Plant("nan", ("packed, causal",), leaking, "^packed, causal: "),
    "drift": Plant("repeats", ("causal",), of_result(0, Drifting()), "^causal: "),
    "of JAX": Plant("frameworks", ("packed, causal",), of_result(0, Drifting()), "^packed, causal: ", subject=JAX),
    "gradient": Plant("bounds", ("causal",), of_result(1, lambda dk: dk * 1.05), "^causal: dk", "backward"),
    "log-sum-exp": Plant("bounds", ("causal",), of_result(1, lambda lse: lse + 0.01), "lse"),
    "hidden key": Plant("mask", ("causal",), of_the_largest_key, "changes with keys that it does not see"),
    "odd address": Plant("bounds", ("causal", "odd addresses"), misaligned, "^odd addresses: out"),
    "exception": Plant(
        "bounds", ("causal", "window"), raises, "^causal: raised RuntimeError: no kernel image(.|\n)*window: raised"
    ),
    "split": Plant("prefix", ("causal",), by_length, "queries 96 to 96, on tensors: lse by"),
    "batch": Plant("batch", ("causal",), of_result(0, lambda out: out * (1 + 1e-6 * len(out))), "alone: out by"),
    "padding": Plant("batch", ("causal",), by_padding, "alone, with padding: out by"),
}


@cache
def without_a_fault(check: str, calls: tuple[str, ...], subject: Subject) -> Entry:
    return entry(check, *calls, subject=subject)


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_fails_the_check_that_is_about_it(name: str) -> None:
    plant = PLANTS[name]
    right = without_a_fault(plant.check, plant.calls, plant.subject)
    assert (right.result, right.draws, right.reason, right.repeat) == ("passed", len(plant.calls), "", "")
    with planted(plant.fault, plant.direction):
        wrong = entry(plant.check, *plant.calls, subject=plant.subject)
    assert wrong.result == "failed" and re.search(plant.says, wrong.reason), wrong
    assert wrong.draws == right.draws
    assert (
        wrong.repeat.startswith("attn certify --backend math --framework") and f"--check {plant.check}" in wrong.repeat
    )


@pytest.mark.parametrize("right", [0, 2])
def test_a_mask_that_is_off_by_one_fails_the_probe(right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagonal that shows one key too many, and a window that shows one key too few."""
    monkeypatch.setattr(module, "calls_of", lambda check: {name: calls_of(check)[name] for name in ("plain", "causal")})
    with planted(misread(**({"causal": False, "window": (None, 1)} if right else {"window": (0, 0)}))):
        wrong = entry("mask", "plain", "causal")
        assert wrong.result == "failed" and "plain" not in wrong.reason
        assert ("seen though hidden" if right else "hidden though visible") in wrong.reason
        again = attn(*wrong.repeat.removeprefix("attn ").split())
        assert again.exit_code == 1 and "though" in again.stdout, "the printed command shows the fault again"


def test_without_claims_invariance_is_not_run() -> None:
    flash = Subject("sdpa_flash", "torch", "cpu")
    for check in ("batch", "prefix"):
        found = entry(check, "causal", subject=flash)
        assert found.result == "not run" and all("invariant" in why for why in found.refused), found


# The file


def certificate(*entries: Entry) -> Certificate:
    return {
        **{"date": "2026-11-27 20:00 UTC", "seconds": 2.5, "devices": {"torch": "cpu"}, "device_name": "a processor"},
        **{"cpu_capability": "AVX2", "versions": {"torch": "2.13.0", "jax": None}, "backends": [], "checks": []},
        **{"known_bad": [], "not_run": [{"what": "dropout", "why": "seeds"}]},
        "entries": [entry._asdict() for entry in entries],
    }


PASSED = Entry(check="mask", backend="math", framework="torch", device="cpu", result="passed", draws=3)
FAILED = PASSED._replace(check="bounds", result="failed", worst=1.5, reason="out", repeat="attn certify")


def test_a_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write(certificate(PASSED, FAILED), path)
    assert read(path) == certificate(PASSED, FAILED)
    assert (count(read(path), "passed"), count(read(path), "failed")) == (1, 1)


EDITED = "checksum: the content was changed"
DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no object": (lambda raw: [raw], "expected a file written by"),
    "another format": (lambda raw: raw | {"format": 2}, "format=2: expected 1"),
    "a format that is true": (lambda raw: raw | {"format": True}, "format=True: expected 1"),
    "a missing field": (lambda raw: {k: v for k, v in raw.items() if k != "seconds"}, EDITED),
    "an unknown field": (lambda raw: raw | {"more": 1}, EDITED),
    "another type": (lambda raw: raw | {"seconds": "0"}, EDITED),
    "an unknown result": (lambda raw: raw | {"entries": [raw["entries"][0] | {"result": "fine"}]}, EDITED),
    "an entry that is none": (lambda raw: raw | {"entries": [1]}, EDITED),
    "no device": (lambda raw: raw | {"devices": {}}, EDITED),
    "a version that is a number": (lambda raw: raw | {"versions": {"torch": 2}}, EDITED),
    "an edit": (lambda raw: raw | {"seconds": 1}, EDITED),
    "no checksum": (lambda raw: {k: v for k, v in raw.items() if k != "checksum"}, EDITED),
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


# The command


def test_the_command_writes_and_fails_with_a_fault(tmp_path: Path) -> None:
    first, second = (str(tmp_path / name) for name in ("new/first.json", "second.json"))
    options = ("certify", "--backend", "math", "--framework", "torch", "--check", "repeats", "--json")
    done = attn(*options, first)
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("OK: all 1 checks that ran passed. torch ")
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "/" not in line)
    written = read(Path(first))
    assert [each["draws"] for each in written["entries"]] == [len(calls_of("repeats"))] and written["cpu_capability"]
    with faulty("math", "forward", with_result(0, Drifting())):
        done = attn(*options, second)
    assert done.exit_code == 1 and "FAILED: 1 of 1 checks." in done.stdout and "another run: out by" in done.stdout
    assert [each["result"] for each in read(Path(second))["entries"]] == ["failed"]


def test_a_whole_run_is_kept_in_the_users_folder_and_doctor_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(module, "subjects_on", lambda places, names: [TORCH])
    monkeypatch.setattr(module, "calls_of", lambda check: dict(islice(calls_of(check).items(), 2)))
    assert standing_of("cpu", versions()) is None
    done = attn("certify", "--device", "cpu")
    assert done.exit_code == 0, done.output
    path = user_path("cpu")
    assert path.parent == tmp_path / "attn-core" and f"wrote {path}" in done.stdout
    standing = standing_of("cpu", versions())
    passed = f"{len(JUDGED['math in torch'])} checks passed, 0 failed"
    assert standing is not None and standing.endswith(f"{passed}; nothing has changed since")
    stale = standing_of("cpu", versions() | {"torch": "9.9.9"})
    assert stale is not None and f"since then torch: {torch.__version__} -> 9.9.9: run attn certify again" in stale
    path.write_text("{")
    damaged = standing_of("cpu", versions())
    assert damaged is not None and damaged.startswith("cannot be read: ")


@pytest.mark.sampled
@pytest.mark.parametrize("check", CHECKS)
def test_the_math_of_torch_passes_all_calls(check: str) -> None:
    subject = JAX if check == "frameworks" else TORCH
    assert entry(check, subject=subject).result == "passed"


def test_a_run_without_any_check_is_no_success() -> None:
    done = attn("certify", "--backend", "flash4", "--device", "cpu", "--check", "mask")
    assert done.exit_code == 1 and done.stdout.startswith("NOTHING RAN. ")
    assert "no kernel for cpu (flash4 in torch, flash4 in jax)" in done.stdout


def test_a_part_is_not_kept_in_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    done = attn("certify", "--backend", "math", "--framework", "torch", "--device", "cpu", "--check", "repeats")
    assert done.exit_code == 0 and "nothing was written" in done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "options",
    [
        ["--backend", "mathh"],
        ["--framework", "tf"],
        ["--check", "all"],
        ["--device", "h100"],
        ["--json", "/proc/no/certificate.json"],
    ],
    ids=" ".join,
)
def test_invalid_options_are_one_error_before_anything_runs(options: list[str]) -> None:
    done = attn("certify", *options)
    assert done.exit_code == 2 and done.stderr.startswith("attn: ") and done.stdout == ""
