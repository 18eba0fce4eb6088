"""``attn doctor``: says whether attention is right on this machine, what is wrong, and what to install next."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.console import Console

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.cli.advice import Advice, Machine, Problem, advise, find_machine, problems, requirements, runs_on
from attn_core.cli.certify.calls import CALLS, Form, Subject, accepted, faults_of, forms, subjects_on
from attn_core.cli.certify.certificate import standing_of
from attn_core.cli.compare import Row, rows_of
from attn_core.cli.devices import devices_of, installed, versions
from attn_core.cli.trial import draw
from attn_core.selection import preference, tables
from attn_core.selection.choice import COLUMNS, wrapped
from attn_core.selection.tables import device_name
from attn_core.selection.target import bridge_reason

CHECKED = "grouped heads"
"""The call of ``attn certify`` that backends are checked with, in the fullest form that each takes."""

SPOKEN = {"torch": "torch", "jax": "JAX"}
FIRST = 16
"""The width of the first of two columns."""


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts and bug reports.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Also print every backend that does not run here, with the reason.")
    ] = False,
) -> None:
    """Say whether attention is right on this machine, what is wrong, and what to install next.

    Runs a small call on every available backend and compares it with the float64 reference.

    Exit code: 0 if at least one backend runs, all were right, and every installed package works; 1 otherwise.
    """
    findings = examine(Console(stderr=True, quiet=json))
    if json:
        typer.echo(json_text.dumps(findings.as_json(), indent=2))
    else:
        for line in report(findings, everything):
            typer.echo(line)
    if not findings.healthy:
        raise typer.Exit(1)


@dataclass(frozen=True)
class State:
    """One record of a backend in this installation. Some backends have one record for CPUs and one for GPUs."""

    name: str
    kind: str  # of the devices that the record is for
    unproven: bool  # whether this project never ran it on a device that it claims
    version: str | None  # what it runs on; None if it is not available
    reason: str | None  # why it is not available; else None
    here: bool  # whether it has kernels for a device of this machine


@dataclass(frozen=True)
class Findings:
    """Everything that ``attn doctor`` knows about an installation."""

    versions: dict[str, str | None]  # of the packages, by name; None if not installed
    devices: dict[str, list[str]]  # of each framework: ``"cpu"`` first, then GPUs
    errors: dict[str, str]  # why a framework or a plug-in that is installed does not work
    machine: Machine
    processor: str | None
    tables: dict[str, str]  # which table decides, by framework and device
    bridge: str | None  # why JAX cannot reach torch's kernels, or None
    backends: dict[str, State]  # every record of every backend, by its label
    checks: list[Row]
    faults: tuple[known_bad.Row, ...]  # those of installed kernels, as ``faults_of`` returns them
    problems: tuple[Problem, ...]
    advice: tuple[Advice, ...]
    # what `attn certify` wrote about this machine, and whether it still holds; None if there is none
    certificate: str | None

    @property
    def right(self) -> list[Row]:
        """The checks that ran and were right, or as near as the backend promises."""
        return [row for row in self.checks if row.accuracy is not None and not row.wrong]

    @property
    def wrong(self) -> list[Row]:
        """The checks that raised or gave wrong numbers."""
        return [row for row in self.checks if row.wrong]

    @property
    def broken(self) -> dict[str, str]:
        """Installed packages of which no backend works here, with the reason; and frameworks and plug-ins that fail."""
        groups: dict[str, list[str | None]] = {}
        for state in self.backends.values():
            for name in requirements(state.name, state.kind) if state.here else ():
                if self.versions.get(name) is not None:
                    groups.setdefault(name, []).append(state.reason or self._refusal_of_build(state.name))
        return self.errors | {name: reasons[0] for name, reasons in groups.items() if reasons[0] and all(reasons)}

    def _refusal_of_build(self, name: str) -> str | None:
        """Returns why a backend that imports cannot launch its kernels here, or None if it can."""
        rows = [row for row in self.checks if row.backend == name]
        reasons = [next((text for text in row.reasons if text.startswith("not available")), None) for row in rows]
        return reasons[0] if reasons and all(reasons) else None

    @property
    def healthy(self) -> bool:
        """Whether something runs, all of it was right, and every installed package works."""
        return bool(self.right) and not self.wrong and not self.broken

    @property
    def used(self) -> dict[str, str]:
        """The best device of each framework."""
        return {framework: named[-1] for framework, named in self.devices.items()}

    def running(self, framework: str) -> list[str]:
        """Returns the backends that were right in a framework on its best device, the first choices first."""
        device = self.used[framework]
        order = backends.usual_order(framework, backends.kind_of(device))
        names = [row.backend for row in self.right if row.framework == framework and row.device == device]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))

    def as_json(self) -> dict[str, object]:
        """Returns everything as plain data."""
        plain = asdict(replace(self, checks=[], faults=()))
        del plain["errors"], plain["machine"]["packages"]
        shown = ("name", "backends", "package", "versions", "symptom", "link")
        return plain | {
            "healthy": self.healthy,
            "runs": {framework: self.running(framework) for framework in self.devices},
            "checks": [row.as_json() | {"device": row.device} for row in self.checks],
            "broken": self.broken,
            "faults": [
                {"device": row.devices[0]} | {name: getattr(row, name) for name in shown} for row in self.faults
            ],
        }


def examine(progress: Console) -> Findings:
    """Returns the findings on this installation. Imports the frameworks, and runs every available backend."""
    devices: dict[str, list[str]] = {}
    errors = {f"plug-in {name}": why for name, why in backends.broken_plug_ins().items()}
    with progress.status("looking for frameworks"):
        for framework in installed():
            try:
                devices[framework] = list(devices_of(framework))
            except Exception as error:  # doctor must report a broken installation, not crash on it
                errors[framework] = f"{type(error).__name__}: {error}"
        places = [(framework, device) for framework, named in devices.items() for device in named]
        seen = [device for _, device in places]
        packages = versions()
        machine = find_machine(packages, seen)
        states = {label: _state(name, kind, seen) for label, name, kind in _files()}
        bridge = bridge_reason() if {"torch", "jax"} <= set(devices) else "needs both torch and jax"
    rows: list[Row] = []
    with progress.status("checking the backends"):
        for state in states.values():
            rows += _check(state.name, state.kind, devices) if state.reason is None else []
    return Findings(
        versions=packages,
        devices=devices,
        errors=errors,
        machine=machine,
        processor=device_name("cpu"),
        tables={
            f"{framework} on {device}": preference.source(framework, device) or _without_table(device)
            for framework, device in places
        },
        bridge=bridge,
        backends=states,
        checks=rows,
        faults=faults_of(subjects_on(places)),
        problems=problems(machine),
        advice=advise(machine),
        certificate=standing_of(next((named[-1] for named in devices.values() if len(named) > 1), "cpu"), packages),
    )


def _without_table(device: str) -> str:
    """Returns what decides on a device that nobody measured here."""
    if any(row.first for row in tables.published() if row.device == device):
        return "the static order, corrected by published figures: nothing was measured here"
    return "the static order: nothing was measured"


def _files() -> list[tuple[str, str, str]]:
    """Returns (label, name, kind of device) for every record of every backend."""
    files = [(name, kind or "cpu") for name in backends.names() for kind in backends.records(name)]
    return [(name if kind == "cpu" else f"{name} ({kind})", name, kind) for name, kind in files]


def _state(name: str, kind: str, devices: list[str]) -> State:
    here = any(runs_on(name, device) for device in _present(name, kind, devices))
    unproven = backends.load(name, kind).forward_claims.unproven
    return State(name, kind, unproven, *backends.availability(name, kind), here=here)


def _present(name: str, kind: str, devices: list[str]) -> list[str]:
    """Returns the devices that a record of a backend is for and claims."""
    record = backends.load(name, kind)
    ours = [device for device in devices if backends.load(name, backends.kind_of(device)) is record]
    return [device for device in ours if record.forward_claims.runs_on(device)]


def _check(name: str, kind: str, devices: dict[str, list[str]]) -> list[Row]:
    """Returns a row for each framework that can call the backend, on the framework's GPU if the backend runs there."""
    rows: list[Row] = []
    for framework, named in devices.items():
        present = _present(name, kind, named)
        if not present or (backends.load(name, kind).framework == "jax" and framework == "torch"):
            continue
        subject = Subject(name, framework, present[-1])
        form = accepted(subject, CALLS[CHECKED])
        spec = form.spec if isinstance(form, Form) else next(forms(subject, CALLS[CHECKED])).spec
        rows += rows_of(draw(spec), subject.device, names=(name,), frameworks=(framework,))
    return rows


def report(findings: Findings, everything: bool) -> Iterator[str]:
    """Yields the lines of the report; ``everything``: with the reason of each backend that does not run here."""
    yield wrapped(_verdict(findings))
    yield wrapped(_summary(findings))
    sections = {
        "This machine": _machine(findings),
        "Right (the error as a part of its bound)": _right(findings),
        "Wrong": _wrong(findings),
        "Known faults: calls that would meet one take another kernel": _faults(findings),
        "Known problems": _problems(findings),
        "Install next": _next(findings),
        "Not here" if everything else "Not here (attn doctor --all gives every reason)": (
            _reasons(findings) if everything else _groups(findings)
        ),
    }
    for title, section in sections.items():
        if lines := list(section):
            yield "\n".join(["", wrapped(title), *lines])


def _verdict(findings: Findings) -> str:
    wrong = {row.backend for row in findings.wrong}
    if wrong:
        return f"WRONG: the check failed for {', '.join(sorted(wrong))}."
    if not findings.right:
        return "NOTHING RUNS: " + ("no backend was right." if findings.devices else "neither torch nor JAX works here.")
    if findings.broken:
        return f"BROKEN: installed, but not working: {', '.join(findings.broken)}. All other numbers were right."
    if findings.machine.device != "cpu" and {*findings.used.values()} <= {"cpu"}:
        return "CPU ONLY: all backends that run here were right, but no framework uses the accelerator."
    return "OK: all backends that run on this machine computed right numbers."


def _summary(findings: Findings) -> str:
    """Returns which framework runs how many backends, the unused accelerator, and the next steps."""
    counts = {name: len(findings.running(name)) for name in findings.used}
    runs = [f"{SPOKEN[name]} runs {counts[name]} backends on {findings.used[name]}" for name in counts if counts[name]]
    steps = [advice.package for advice in findings.advice if advice.level == "next"]
    idle = [SPOKEN[name] for name, device in findings.used.items() if device == "cpu" != findings.machine.device]
    sentences = [
        ", ".join(runs) + "." if runs else "",
        f"Not used by {' and '.join(idle)}: {_accelerator(findings.machine)}." if idle else "",
        f"Known problems: {len(findings.problems)}." if findings.problems else "",
        f"Install next: {', '.join(steps) or 'nothing'}.",
    ]
    return " ".join(filter(None, sentences))


def _accelerator(machine: Machine) -> str:
    counts = {name: machine.gpus.count(name) for name in machine.gpus}
    named = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
    return f"{named} ({machine.device})" if named else machine.device


def _machine(findings: Findings) -> Iterator[str]:
    """Yields the lines about the machine, its packages, and where the order of automatic choice comes from."""
    machine, there = findings.machine, {name: text for name, text in findings.versions.items() if text is not None}
    builds = {
        "torch": "ROCm" if machine.torch_hip else _cuda(machine.torch_cuda),
        "jax": _cuda((machine.jax_cuda,) if machine.jax_cuda else None),
    }
    to_jax = findings.bridge if findings.bridge is not None else "JAX runs torch's kernels"
    rows = {
        "accelerator": "none" if machine.device == "cpu" else _accelerator(machine),
        "driver": machine.driver,
        "processor": findings.processor,
        **{name: f"{there[name]}, {builds[name]}" for name in builds if name in there},
        "other packages": ", ".join(f"{name} {version}" for name, version in there.items() if name not in builds),
        "certificate": findings.certificate or "none; attn certify writes one",
        "torch to JAX": to_jax if {"torch", "jax"} <= set(there) else "",
    }
    for name, text in rows.items():
        yield from _two(name, text) if text else ()
    for where, source in findings.tables.items():
        yield from _paragraph(f"choice in {where}: {source}")


def _cuda(version: tuple[int, ...] | None) -> str:
    return f"CUDA {'.'.join(map(str, version))}" if version else "without CUDA"


def _right(findings: Findings) -> Iterator[str]:
    for name in dict.fromkeys(row.backend for row in findings.right):
        # Frameworks with one result on one device share a text, such as "torch and JAX on sm90: 0.08".
        frameworks: dict[str, list[str]] = {}
        for row in findings.right:
            if row.backend == name:
                frameworks.setdefault(f"on {row.device}: {_result(row)}", []).append(SPOKEN[row.framework])
        yield from _two(name, "; ".join(f"{' and '.join(names)} {text}" for text, names in frameworks.items()))
    if findings.right:
        yield from _paragraph(f"The call: {CHECKED!r} of attn certify, with gradients if the backend has them.", 2)


def _result(row: Row) -> str:
    use = f"{row.accuracy.worst:.2f}" if row.accuracy is not None else ""
    gradients = "" if row.results and "dq" in row.results else ", forward only"
    return use + gradients + (", approximate" if row.approximate else "")


def _wrong(findings: Findings) -> Iterator[str]:
    for name, reason in findings.broken.items():
        yield from _two(name, reason)
    for row in findings.wrong:
        text = "; ".join(row.reasons) if row.accuracy is None else f"error {row.accuracy.worst:.2f} times the bound"
        yield from _two(row.backend, f"in {SPOKEN[row.framework]} on {row.device}: {text}")


def _faults(findings: Findings) -> Iterator[str]:
    for row in findings.faults:
        where = f"{row.package} {row.versions}".strip()
        yield from _two(", ".join(row.backends), f"on {row.devices[0]}: {row.symptom} ({where}; {row.link})")


def _problems(findings: Findings) -> Iterator[str]:
    for number, problem in enumerate(findings.problems, start=1):
        yield from _paragraph(f"{number}. {problem.text}", 5, problem.commands)


def _next(findings: Findings) -> Iterator[str]:
    """Yields the lines of advice: what to install next, what is optional, and what to leave."""
    levels: dict[str, list[Advice]] = {"next": [], "optional": [], "avoid": []}
    for advice in findings.advice:
        levels[advice.level].append(advice)
    for number, advice in enumerate(levels["next"], start=1):
        calls = f"Automatic choice then uses it for {', '.join(advice.calls)}." if advice.calls else ""
        text = " ".join(filter(None, (f"{number}. {advice.package}. {advice.why}", calls, advice.note)))
        yield from _paragraph(text, 5, advice.commands)
    if not levels["next"]:
        device = findings.machine.device
        has = any(runs_on(state.name, device) for state in findings.backends.values())
        yield from _paragraph(f"Nothing: no package {'would be used' if has else 'has a kernel'} for {device}.")
    for advice in levels["optional"]:
        yield from _paragraph(f"Optional: {advice.package}. {advice.why}", commands=advice.commands)
    for advice in levels["avoid"]:
        yield from _paragraph(f"Not {advice.package}: {advice.why}")


def _groups(findings: Findings) -> Iterator[str]:
    """Yields the backends that do not run here, in groups."""
    ran = {row.backend for row in findings.checks if row.results is not None or row.failed}
    groups: dict[str, dict[str, None]] = {}
    for state in findings.backends.values():
        if state.name not in ran:
            groups.setdefault(_group(state, findings), {})[state.name] = None
    for title, names in groups.items():
        yield from _paragraph(f"{title}: {', '.join(names)}")


def _group(state: State, findings: Findings) -> str:
    accelerator = findings.machine.device
    if state.here:
        return "not installed" if state.reason else "for other calls than the one checked"
    if runs_on(state.name, accelerator):
        return f"for {accelerator}, which no framework uses here"
    devices = [device for named in findings.devices.values() for device in named]
    return f"no kernel for {' or '.join(dict.fromkeys([*devices, accelerator]))}"


def _reasons(findings: Findings) -> Iterator[str]:
    """Yields every record that does not run here with its reason, and the refusals of the check."""
    for label, state in findings.backends.items():
        rows = [row for row in findings.checks if row.backend == state.name and row.reasons and not row.failed]
        refused = [f"{SPOKEN[row.framework]}: {'; '.join(row.reasons)}" for row in rows]
        device = "" if state.here else "no kernel for a device of this machine; "
        reason = state.reason or ("; ".join(refused) if state.here else "installed")
        never_run = backends.load(state.name, state.kind).forward_claims.never_run
        if state.reason or refused or not state.here:
            yield from _paragraph(f"{label}: {device}{reason}{f'; {never_run}' if never_run else ''}")


def _two(name: str, text: str) -> Iterator[str]:
    """Yields a row of two columns."""
    return _paragraph(f"{name:<{FIRST}}{text}" if len(name) < FIRST else f"{name} {text}", FIRST + 2)


def _paragraph(text: str, indent: int = 4, commands: tuple[str, ...] = ()) -> Iterator[str]:
    """Yields a text, indented after its first line, and commands to copy.

    A long command continues after a backslash, before its first long option.
    """
    yield wrapped(text, "  ", " " * indent)
    margin = " " * (indent + 2)
    for command in commands:
        whole = len(margin + command) <= COLUMNS
        yield margin + (command if whole else command.replace(" --", f" \\\n{margin}  --", 1))
