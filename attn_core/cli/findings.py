"""What ``attn doctor`` knows about an installation: its packages, devices and backends, and a check of each backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.programs import operator_library
from attn_core.call.spec import AttentionSpec
from attn_core.cli.advice import Advice, Machine, Problem, advise, find_machine, problems
from attn_core.cli.advice.packages import requirements, runs_on
from attn_core.cli.certify.standing import Standing, standing_of
from attn_core.cli.comparison import Row, rows_of
from attn_core.cli.frameworks import devices_of, installed, versions
from attn_core.cli.trial import draw
from attn_core.selection import preference
from attn_core.selection.choice import refusals
from attn_core.selection.tables import device_name
from attn_core.selection.target import Target, bridge_reason

CHECKED = AttentionSpec(
    batch=2,
    q_len=37,
    kv_len=41,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    value_dim=64,
    dtype="float32",
    causal=True,
)
"""The call that backends are checked with: GQA, causal, q_len != kv_len; with gradients if the backend has any."""

EVEN_LENGTH = 128
"""The length of queries and keys for a backend that refuses CHECKED, such as cuDNN: both alignments agree there."""


class State(NamedTuple):
    """One module of a backend in this installation. Some backends have one module for CPUs and one for GPUs.

    Attributes:
        name, kind: the backend, and the kind of device that the module is for.
        unproven: whether this project never ran it on a device that it claims.
        version: what it runs on, or None if it is not available.
        reason: why it is not available, or None if it is.
        here: whether it has kernels for a device of this machine.
    """

    name: str
    kind: str
    unproven: bool
    version: str | None
    reason: str | None
    here: bool


class Fault(NamedTuple):
    """A known fault of an installed kernel: selection refuses the calls that would meet it.

    Attributes:
        name: of the row in ``known_bad.json``.
        backends: those whose kernel has it here.
        device: such as ``"sm90"``.
        package: that has the fault.
        versions: the faulty ones; empty for all.
        symptom: what goes wrong.
        link: to the report.
    """

    name: str
    backends: tuple[str, ...]
    device: str
    package: str
    versions: str
    symptom: str
    link: str

    @property
    def where(self) -> str:
        """The package and its versions."""
        return f"{self.package} {self.versions}".strip()


@dataclass(frozen=True)
class Findings:
    """Everything that ``attn doctor`` knows about an installation.

    Attributes:
        versions: of the packages, by name; None if not installed.
        devices: of each framework: ``"cpu"`` first, then GPUs.
        errors: why a framework that is installed does not work.
        machine: what advice depends on.
        processor: its name and number of cores.
        tables: which table decides, by framework and device.
        bridge: why JAX cannot reach torch's kernels, or None.
        backends: every module of every backend, by its label.
        checks: a row for each backend in each framework that was checked.
        faults: known faults of installed kernels.
        problems: known-bad combinations of packages.
        advice: what to install.
        operators: why XLA cannot run torch's operators without Python on this GPU; None if it can, or has no GPU.
        certificate: what `attn certify` wrote about this machine, and whether it still holds; None if there is none.
    """

    versions: dict[str, str | None]
    devices: dict[str, list[str]]
    errors: dict[str, str]
    machine: Machine
    processor: str | None
    tables: dict[str, str]
    bridge: str | None
    backends: dict[str, State]
    checks: list[Row]
    faults: tuple[Fault, ...]
    problems: tuple[Problem, ...]
    advice: tuple[Advice, ...]
    operators: str | None = None
    certificate: Standing | None = None

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
        """Installed packages of which no backend works here, with the reason; and frameworks that fail."""
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

    def as_json(self) -> dict[str, Any]:
        """Returns everything as plain data."""
        return {
            "healthy": self.healthy,
            "runs": {framework: self.running(framework) for framework in self.devices},
            "versions": self.versions,
            "devices": self.devices,
            "machine": {name: value for name, value in asdict(self.machine).items() if name != "packages"},
            "processor": self.processor,
            "tables": self.tables,
            "bridge": self.bridge,
            "operators": self.operators,
            "certificate": None if self.certificate is None else self.certificate._asdict(),
            "backends": {label: state._asdict() for label, state in self.backends.items()},
            "checks": [row.as_json() | {"device": row.device} for row in self.checks],
            "broken": self.broken,
            "faults": [fault._asdict() for fault in self.faults],
            "problems": [asdict(problem) for problem in self.problems],
            "advice": [asdict(advice) for advice in self.advice],
        }

    def running(self, framework: str) -> list[str]:
        """Returns the backends that were right in a framework on its best device, the first choices first."""
        device = self.devices[framework][-1] if self.devices[framework] else ""
        order = backends.usual_order(framework, backends.kind_of(device))
        names = [row.backend for row in self.right if row.framework == framework and row.device == device]
        return sorted(names, key=lambda name: order.index(name) if name in order else len(order))


def examine(progress: Console) -> Findings:
    """Returns the findings on this installation. Imports the frameworks, and runs every available backend."""
    with progress.status("looking for frameworks"):
        devices, errors = _all_devices()
        packages = versions()
        machine = find_machine(packages, _accelerators(devices))
        states = {label: _state(name, kind, devices) for label, name, kind in _files()}
        bridge = bridge_reason() if {"torch", "jax"} <= set(devices) else "needs both torch and jax"
    tables = {
        f"{framework} on {device}": preference.source(framework, device) or "the static order: nothing was measured"
        for framework, named in devices.items()
        for device in named
    }
    rows: list[Row] = []
    with progress.status("checking the backends"):
        for state in states.values():
            rows += _check(state.name, state.kind, devices) if state.reason is None else []
    return Findings(
        *(packages, devices, errors, machine, device_name("cpu"), tables, bridge, states, rows),
        faults_of(Target.here(framework, device) for framework, named in devices.items() for device in named),
        *(problems(machine), advise(machine)),
        operators=operator_library.missing() if bridge is None and machine.jax_cuda and machine.torch_cuda else None,
        certificate=standing_of(next((named[-1] for named in devices.values() if len(named) > 1), "cpu"), packages),
    )


def _all_devices() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the devices of each framework that works, and an error for each that does not."""
    devices: dict[str, list[str]] = {}
    errors: dict[str, str] = {}
    for framework in installed():
        try:
            devices[framework] = _devices(framework)
        except Exception as error:  # doctor must report a broken installation, not crash on it
            errors[framework] = f"{type(error).__name__}: {error}"
    return devices, errors


def _devices(framework: str) -> list[str]:
    return list(devices_of(framework))


def _accelerators(devices: dict[str, list[str]]) -> list[str]:
    return [device for named in devices.values() for device in named[1:]]


def _files() -> list[tuple[str, str, str]]:
    """Returns (label, name, kind of device) for every module of every backend. Some have one each for CPUs and GPUs."""
    files = [(name, kind or "cpu") for name in backends.names() for kind in backends.modules(name)]
    return [(name if kind == "cpu" else f"{name} ({kind})", name, kind) for name, kind in files]


def _state(name: str, kind: str, devices: dict[str, list[str]]) -> State:
    present = _present(name, kind, [device for named in devices.values() for device in named])
    unproven = backends.load(name, kind).FORWARD.unproven
    return State(name, kind, unproven, *backends.availability(name, kind), here=any(runs_on(name, d) for d in present))


def _present(name: str, kind: str, devices: list[str]) -> list[str]:
    """Returns the devices that a module of a backend is for and claims."""
    module = backends.load(name, kind)
    ours = [device for device in devices if backends.load(name, backends.kind_of(device)) is module]
    return [device for device in ours if module.FORWARD.runs_on(device)]


def _check(name: str, kind: str, devices: dict[str, list[str]]) -> list[Row]:
    """Returns a row for each framework that can call the backend, on the framework's GPU if the backend runs there."""
    backend = backends.load(name, kind)
    # Some kernels take no float32: they are checked in a half dtype.
    half = "bfloat16" if "bfloat16" in backend.FORWARD.dtypes else backend.FORWARD.dtypes[0]
    spec = CHECKED if "float32" in backend.FORWARD.dtypes else replace(CHECKED, dtype=half)
    even = replace(spec, q_len=EVEN_LENGTH, kv_len=EVEN_LENGTH, causal=backend.FORWARD.causal)
    rows: list[Row] = []
    for framework, named in devices.items():
        present = _present(name, kind, named)
        if not present or (backend.FRAMEWORK == "jax" and framework == "torch"):
            continue
        target = Target.here(framework, present[-1])
        # The claims on this machine, because a build may lack the backward that the backend claims.
        learns = target.claims(name)[1] is not None
        calls = [replace(each, needs_backward=learns) for each in (spec, even)]
        call = next((each for each in calls if not refusals(name, each, target)), calls[0])
        rows += rows_of(draw(call), present[-1], repeats=1, names=(name,), frameworks=(framework,))
    return rows


def faults_of(targets: Iterable[Target]) -> tuple[Fault, ...]:
    """Returns the known faults of the kernels that are installed on some targets and claim their devices."""
    found: dict[tuple[known_bad.Row, str], dict[str, None]] = {}
    for target in targets:
        missing = {name for name, _ in target.unavailable}
        for name in backends.names():
            if name in missing or target.out_of_reach(name) is not None:
                continue
            build = target.build(name)
            rows = known_bad.rows_of(name, target.device, () if build is None else build.version)
            for row in rows if target.claims(name)[0].runs_on(target.device) else ():
                found.setdefault((row, target.device), {})[name] = None
    return tuple(
        Fault(row.name, tuple(names), device, row.package, row.versions, row.symptom, row.link)
        for (row, device), names in found.items()
    )
