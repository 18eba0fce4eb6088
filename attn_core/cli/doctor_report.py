"""The text of ``attn doctor``: the verdict, the machine, what runs, what is wrong, and what to install next."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator

from attn_core import backends
from attn_core.cli.advice import Advice
from attn_core.cli.advice.packages import runs_on
from attn_core.cli.comparison import Row
from attn_core.cli.findings import CHECKED, EVEN_LENGTH, Findings, State

SPOKEN = {"torch": "torch", "jax": "JAX"}
FIRST = 16
"""The width of the first of two columns."""


def report(findings: Findings, everything: bool) -> Iterator[str]:
    """Yields the lines of the report, not wider than the terminal unless a single word is.

    Args:
        everything: whether to give the reason of each backend that does not run here.
    """
    yield from _wrap(_verdict(findings))
    yield from _wrap(_summary(findings))
    absent = _reasons(findings) if everything else _groups(findings)
    sections = {
        "This machine": _machine(findings),
        "Right (the error as a part of its bound)": _right(findings),
        "Wrong": _wrong(findings),
        "Known faults: calls that would meet one take another kernel": _faults(findings),
        "Known problems": _problems(findings),
        "Install next": _next(findings),
        "Not here" if everything else "Not here (attn doctor --all gives every reason)": absent,
    }
    for title, lines in sections.items():
        content = list(lines)
        if content:
            yield from ("", *_wrap(title))
            yield from content


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
    machine, steps = findings.machine, [advice.package for advice in findings.advice if advice.level == "next"]
    idle = [SPOKEN[name] for name, device in used.items() if device == "cpu" != machine.device]
    return " ".join(
        [
            *([", ".join(runs) + "."] if runs else []),
            *([f"Not used by {' and '.join(idle)}: {_accelerator(findings)}."] if idle else []),
            *([f"Known problems: {len(findings.problems)}."] if findings.problems else []),
            f"Install next: {', '.join(steps) or 'nothing'}.",
        ]
    )


def _accelerator(findings: Findings) -> str:
    machine = findings.machine
    named = ", ".join(_counted(name, machine.gpus.count(name)) for name in dict.fromkeys(machine.gpus))
    return f"{named} ({machine.device})" if named else machine.device


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{count} x {name}"


def _machine(findings: Findings) -> Iterator[str]:
    machine, there = findings.machine, {name: text for name, text in findings.versions.items() if text is not None}
    builds = {
        "torch": "ROCm" if machine.torch_hip else _cuda(machine.torch_cuda),
        "jax": _cuda((machine.jax_cuda,) if machine.jax_cuda else None),
    }
    rows = {
        "accelerator": "none" if machine.device == "cpu" else _accelerator(findings),
        "driver": machine.driver,
        "processor": findings.processor or "",
        **{name: f"{there[name]}, {builds[name]}" for name in builds if name in there},
        "other packages": ", ".join(f"{name} {version}" for name, version in there.items() if name not in builds),
        "certificate": "none; attn certify writes one" if findings.certificate is None else str(findings.certificate),
        "torch to JAX": _to_jax(findings) if {"torch", "jax"} <= set(there) else "",
    }
    for name, text in rows.items():
        if text:
            yield from _two(name, text)
    for where, source in findings.tables.items():
        yield from _wrap(f"choice in {where}: {source}", "  ", "    ")


def _to_jax(findings: Findings) -> str:
    """Returns whether JAX runs torch's kernels, and what keeps it from running torch's operators without Python."""
    if findings.bridge is not None:
        return findings.bridge
    return f"JAX runs torch's kernels{'; ' + findings.operators if findings.operators else ''}"


def _cuda(version: tuple[int, ...] | None) -> str:
    return f"CUDA {'.'.join(map(str, version))}" if version else "without CUDA"


def _wrong(findings: Findings) -> Iterator[str]:
    for name, reason in findings.broken.items():
        yield from _two(name, reason)
    for row in findings.wrong:
        text = "; ".join(row.reasons) if row.accuracy is None else f"error {row.accuracy.worst:.2f} times the bound"
        yield from _two(row.backend, f"in {SPOKEN[row.framework]} on {row.device}: {text}")


def _problems(findings: Findings) -> Iterator[str]:
    for number, problem in enumerate(findings.problems, start=1):
        yield from _item(number, problem.text, problem.commands)


def _faults(findings: Findings) -> Iterator[str]:
    for fault in findings.faults:
        where = f"{fault.package} {fault.versions}".strip()
        yield from _two(", ".join(fault.backends), f"on {fault.device}: {fault.symptom} ({where}; {fault.link})")


def _next(findings: Findings) -> Iterator[str]:
    levels: dict[str, list[Advice]] = {}
    for advice in findings.advice:
        levels.setdefault(advice.level, []).append(advice)
    for number, advice in enumerate(levels.get("next", ()), start=1):
        calls = f"Automatic choice then uses it for {', '.join(advice.calls)}." if advice.calls else ""
        text = " ".join(filter(None, (f"{advice.package}. {advice.why}", calls, advice.note)))
        yield from _item(number, text, advice.commands)
    if not levels.get("next"):
        device = findings.machine.device
        has = any(runs_on(state.name, device) for state in findings.backends.values())
        why = f"no package would be used for {device}" if has else f"no package has a kernel for {device}"
        yield from _wrap(f"Nothing: {why}.", "  ", "  ")
    for advice in levels.get("optional", ()):
        yield from _wrap(f"Optional: {advice.package}. {advice.why}", "  ", "    ")
        yield from _commands(advice.commands, "      ")
    for advice in levels.get("avoid", ()):
        yield from _wrap(f"Not {advice.package}: {advice.why}", "  ", "    ")


def _right(findings: Findings) -> Iterator[str]:
    rows: dict[str, list[Row]] = {}
    for row in findings.right:
        rows.setdefault(row.backend, []).append(row)
    for name, of_backend in rows.items():
        yield from _two(name, "; ".join(_results(of_backend)))
    if rows:
        call = f"The call: {CHECKED}; with gradients if the backend has them. Kernels without float32 have a half dtype"
        yield from _wrap(f"{call}, and kernels that refuse these lengths have {EVEN_LENGTH}.", "  ", "  ")


def _results(rows: list[Row]) -> Iterator[str]:
    """Yields a text for each distinct result of a backend, such as ``"torch and JAX on sm90: 0.08"``."""
    frameworks: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        gradients = "" if row.outcome and "dq" in row.outcome.arrays else ", forward only"
        use = f"{row.accuracy.worst:.2f}" if row.accuracy is not None else ""
        text = f"{use}{gradients}, approximate" if row.approximate else f"{use}{gradients}"
        frameworks.setdefault((row.device, text), []).append(SPOKEN[row.framework])
    for (device, text), names in frameworks.items():
        yield f"{' and '.join(names)} on {device}: {text}"


def _groups(findings: Findings) -> Iterator[str]:
    """Yields the backends that do not run here, in groups."""
    ran = {row.backend for row in findings.checks if row.outcome is not None or row.failed}
    groups: dict[str, list[str]] = {}
    for state in findings.backends.values():
        if state.name not in ran:
            groups.setdefault(_group(state, findings), []).append(state.name)
    for title, names in groups.items():
        yield from _wrap(f"{title}: {', '.join(dict.fromkeys(names))}", "  ", "    ")


def _group(state: State, findings: Findings) -> str:
    devices = [device for named in findings.devices.values() for device in named]
    if not state.here and runs_on(state.name, findings.machine.device):
        return f"for {findings.machine.device}, which no framework uses here"
    if not state.here:
        return f"no kernel for {' or '.join(dict.fromkeys([*devices, findings.machine.device]))}"
    return "not installed" if state.reason else "for other calls than the one checked"


def _reasons(findings: Findings) -> Iterator[str]:
    """Yields every module that does not run here with its reason, and the refusals of the check."""
    for label, state in findings.backends.items():
        refused = [
            f"{SPOKEN[row.framework]}: {'; '.join(row.reasons)}" for row in findings.checks if _refused(row, state)
        ]
        device = "" if state.here else "no kernel for a device of this machine; "
        reason = state.reason or ("; ".join(refused) if state.here else "installed")
        never_run = backends.load(state.name, state.kind).FORWARD.never_run
        unproven = f"; {never_run}" if never_run else ""
        if state.reason or refused or not state.here:
            yield from _wrap(f"{label}: {device}{reason}{unproven}", "  ", "    ")


def _refused(row: Row, state: State) -> bool:
    return row.backend == state.name and bool(row.reasons) and not row.failed


def _item(number: int, text: str, commands: Iterable[str]) -> Iterator[str]:
    yield from _wrap(f"{number}. {text}", "  ", "     ")
    yield from _commands(commands, "       ")


def _commands(commands: Iterable[str], indent: str) -> Iterator[str]:
    """Yields commands to copy. A long one continues after a backslash, before its first long option."""
    for command in commands:
        start, option, rest = command.partition(" --")
        if option and len(indent + command) > _width():
            yield from (f"{indent}{start} \\", f"{indent}  --{rest}")
        else:
            yield f"{indent}{command}"


def _two(name: str, text: str) -> Iterator[str]:
    yield from _wrap(f"{name:<{FIRST}}{text}" if len(name) < FIRST else f"{name} {text}", "  ", " " * (FIRST + 2))


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
