"""``attn doctor``: says whether attention is right on this machine, what is wrong, and what to install next."""

from __future__ import annotations

import json as json_text
import shutil
import textwrap
from collections.abc import Iterator
from typing import Annotated, NamedTuple

import typer
from rich.console import Console

from attn_core import backends
from attn_core.cli.advice.packages import runs_on
from attn_core.cli.comparison import Row
from attn_core.cli.findings import CHECKED, EVEN_LENGTH, Findings, State, examine

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


class Item(NamedTuple):
    """A paragraph of a section: a text, the columns by which its later lines are indented, and commands to copy."""

    text: str
    indent: int = 4
    commands: tuple[str, ...] = ()


def report(findings: Findings, everything: bool) -> Iterator[str]:
    """Yields the lines of the report, not wider than the terminal unless a single word is.

    Args:
        everything: whether to give the reason of each backend that does not run here.
    """
    yield from _wrap(_verdict(findings))
    yield from _wrap(_summary(findings))
    sections = {
        "This machine": _machine(findings),
        "Right (the error as a part of its bound)": _right(findings),
        "Wrong": _wrong(findings),
        "Known faults: calls that would meet one take another kernel": (
            _two(", ".join(fault.backends), f"on {fault.device}: {fault.symptom} ({fault.where}; {fault.link})")
            for fault in findings.faults
        ),
        "Known problems": (
            Item(f"{number}. {problem.text}", 5, problem.commands)
            for number, problem in enumerate(findings.problems, start=1)
        ),
        "Install next": _next(findings),
        "Not here" if everything else "Not here (attn doctor --all gives every reason)": (
            _reasons(findings) if everything else _groups(findings)
        ),
    }
    for title, items in sections.items():
        content = [line for item in items for line in _lines(item)]
        if content:
            yield from ("", *_wrap(title), *content)


def _verdict(findings: Findings) -> str:
    wrong = {row.backend for row in findings.wrong}
    if wrong:
        return f"WRONG: the check failed for {', '.join(sorted(wrong))}."
    if not findings.right:
        return "NOTHING RUNS: " + ("no backend was right." if findings.devices else "neither torch nor JAX works here.")
    if findings.broken:
        return f"BROKEN: installed, but not working: {', '.join(findings.broken)}. All other numbers were right."
    if findings.machine.device != "cpu" and all(devices[-1] == "cpu" for devices in findings.devices.values()):
        return "CPU ONLY: all backends that run here were right, but no framework uses the accelerator."
    return "OK: all backends that run on this machine computed right numbers."


def _summary(findings: Findings) -> str:
    """Returns which framework runs how many backends, the unused accelerator, and the next steps."""
    used = {name: devices[-1] for name, devices in findings.devices.items()}
    counts = {name: len(findings.running(name)) for name in used}
    runs = [f"{SPOKEN[name]} runs {counts[name]} backends on {device}" for name, device in used.items() if counts[name]]
    steps = [advice.package for advice in findings.advice if advice.level == "next"]
    idle = [SPOKEN[name] for name, device in used.items() if device == "cpu" != findings.machine.device]
    sentences = [
        ", ".join(runs) + "." if runs else "",
        f"Not used by {' and '.join(idle)}: {_accelerator(findings)}." if idle else "",
        f"Known problems: {len(findings.problems)}." if findings.problems else "",
        f"Install next: {', '.join(steps) or 'nothing'}.",
    ]
    return " ".join(filter(None, sentences))


def _accelerator(findings: Findings) -> str:
    machine = findings.machine
    counts = {name: machine.gpus.count(name) for name in machine.gpus}
    named = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
    return f"{named} ({machine.device})" if named else machine.device


def _machine(findings: Findings) -> Iterator[Item]:
    machine, there = findings.machine, {name: text for name, text in findings.versions.items() if text is not None}
    builds = {
        "torch": "ROCm" if machine.torch_hip else _cuda(machine.torch_cuda),
        "jax": _cuda((machine.jax_cuda,) if machine.jax_cuda else None),
    }
    # Whether JAX runs torch's kernels, and what keeps it from running torch's operators without Python.
    operators = f"; {findings.operators}" if findings.operators else ""
    to_jax = findings.bridge if findings.bridge is not None else f"JAX runs torch's kernels{operators}"
    rows = {
        "accelerator": "none" if machine.device == "cpu" else _accelerator(findings),
        "driver": machine.driver,
        "processor": findings.processor or "",
        **{name: f"{there[name]}, {builds[name]}" for name in builds if name in there},
        "other packages": ", ".join(f"{name} {version}" for name, version in there.items() if name not in builds),
        "certificate": "none; attn certify writes one" if findings.certificate is None else str(findings.certificate),
        "torch to JAX": to_jax if {"torch", "jax"} <= set(there) else "",
    }
    yield from (_two(name, text) for name, text in rows.items() if text)
    yield from (Item(f"choice in {where}: {source}") for where, source in findings.tables.items())


def _cuda(version: tuple[int, ...] | None) -> str:
    return f"CUDA {'.'.join(map(str, version))}" if version else "without CUDA"


def _wrong(findings: Findings) -> Iterator[Item]:
    yield from (_two(name, reason) for name, reason in findings.broken.items())
    for row in findings.wrong:
        text = "; ".join(row.reasons) if row.accuracy is None else f"error {row.accuracy.worst:.2f} times the bound"
        yield _two(row.backend, f"in {SPOKEN[row.framework]} on {row.device}: {text}")


def _next(findings: Findings) -> Iterator[Item]:
    number = 0
    for advice in findings.advice:
        if advice.level == "next":
            number += 1
            calls = f"Automatic choice then uses it for {', '.join(advice.calls)}." if advice.calls else ""
            text = " ".join(filter(None, (f"{number}. {advice.package}. {advice.why}", calls, advice.note)))
            yield Item(text, 5, advice.commands)
    if not number:
        device = findings.machine.device
        has = any(runs_on(state.name, device) for state in findings.backends.values())
        yield Item(f"Nothing: no package {'would be used' if has else 'has a kernel'} for {device}.", 2)
    for advice in findings.advice:
        if advice.level == "optional":
            yield Item(f"Optional: {advice.package}. {advice.why}", 4, advice.commands)
        elif advice.level == "avoid":
            yield Item(f"Not {advice.package}: {advice.why}")


def _right(findings: Findings) -> Iterator[Item]:
    for name in dict.fromkeys(row.backend for row in findings.right):
        # Frameworks with one result on one device share a text, such as "torch and JAX on sm90: 0.08".
        frameworks: dict[tuple[str, str], list[str]] = {}
        for row in findings.right:
            if row.backend == name:
                frameworks.setdefault((row.device, _result(row)), []).append(SPOKEN[row.framework])
        results = [f"{' and '.join(names)} on {device}: {text}" for (device, text), names in frameworks.items()]
        yield _two(name, "; ".join(results))
    if findings.right:
        call = f"The call: {CHECKED}; with gradients if the backend has them. Kernels without float32 have a half dtype"
        yield Item(f"{call}, and kernels that refuse these lengths have {EVEN_LENGTH}.", 2)


def _result(row: Row) -> str:
    use = f"{row.accuracy.worst:.2f}" if row.accuracy is not None else ""
    gradients = "" if row.outcome and "dq" in row.outcome.arrays else ", forward only"
    return use + gradients + (", approximate" if row.approximate else "")


def _groups(findings: Findings) -> Iterator[Item]:
    """Yields the backends that do not run here, in groups."""
    ran = {row.backend for row in findings.checks if row.outcome is not None or row.failed}
    groups: dict[str, dict[str, None]] = {}
    for state in findings.backends.values():
        if state.name not in ran:
            groups.setdefault(_group(state, findings), {})[state.name] = None
    yield from (Item(f"{title}: {', '.join(names)}") for title, names in groups.items())


def _group(state: State, findings: Findings) -> str:
    devices = [device for named in findings.devices.values() for device in named]
    if not state.here and runs_on(state.name, findings.machine.device):
        return f"for {findings.machine.device}, which no framework uses here"
    if not state.here:
        return f"no kernel for {' or '.join(dict.fromkeys([*devices, findings.machine.device]))}"
    return "not installed" if state.reason else "for other calls than the one checked"


def _reasons(findings: Findings) -> Iterator[Item]:
    """Yields every module that does not run here with its reason, and the refusals of the check."""
    for label, state in findings.backends.items():
        rows = [row for row in findings.checks if row.backend == state.name and row.reasons and not row.failed]
        refused = [f"{SPOKEN[row.framework]}: {'; '.join(row.reasons)}" for row in rows]
        device = "" if state.here else "no kernel for a device of this machine; "
        reason = state.reason or ("; ".join(refused) if state.here else "installed")
        never_run = backends.load(state.name, state.kind).FORWARD.never_run
        if state.reason or refused or not state.here:
            yield Item(f"{label}: {device}{reason}{f'; {never_run}' if never_run else ''}")


def _two(name: str, text: str) -> Item:
    """Returns a row of two columns."""
    return Item(f"{name:<{FIRST}}{text}" if len(name) < FIRST else f"{name} {text}", FIRST + 2)


def _lines(item: Item) -> Iterator[str]:
    """Yields an item's lines. A long command continues after a backslash, before its first long option."""
    yield from _wrap(item.text, "  ", " " * item.indent)
    indent = " " * (item.indent + 2)
    for command in item.commands:
        start, option, rest = command.partition(" --")
        if option and len(indent + command) > _width():
            yield from (f"{indent}{start} \\", f"{indent}  --{rest}")
        else:
            yield f"{indent}{command}"


def _wrap(text: str, first: str = "", later: str = "") -> list[str]:
    """Returns the lines of a text. Breaks between words only: names such as flash-attn-4 stay whole."""
    return textwrap.wrap(
        text,
        _width(),
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _width() -> int:
    """Returns the columns to use: those of the terminal, 80 in a pipe, and never more than reads well."""
    return max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))
