"""``attn doctor``: shows what is installed and which backends can run, and checks their numbers."""

from __future__ import annotations

import json as json_text
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from attn_core import backends
from attn_core.call.spec import AttentionSpec
from attn_core.cli.comparison import Row, rows_of
from attn_core.cli.frameworks import devices_of, installed, versions
from attn_core.cli.trial import draw
from attn_core.selection import preference
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
"""The call that every backend is checked with: GQA, causal, q_len != kv_len; with gradients if the backend has any."""


def doctor(json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report.")] = False) -> None:
    """Show versions, devices and backends, and check the numbers of each available backend.

    Exit code: 0 if every available backend is right; 1 otherwise.
    """
    console = Console()
    findings = _findings(Console(stderr=True, quiet=json))
    rows = findings.pop("rows")
    if json:
        typer.echo(json_text.dumps(findings | {"checks": [row.as_json() for row in rows]}, indent=2))
    else:
        _show(console, findings, rows)
    if any(row.wrong for row in rows):
        raise typer.Exit(1)


def _findings(progress: Console) -> dict[str, Any]:
    with progress.status("looking for frameworks"):
        here = installed()
        devices = {framework: _devices(framework) for framework in here}
        states: dict[str, Any] = {
            label: {
                **{"name": name, "kind": kind, "unproven": backends.load(name, kind).FORWARD.unproven},
                **dict(zip(("version", "reason"), backends.availability(name, kind))),
            }
            for label, name, kind in _files()
        }
        bridge = bridge_reason() if {"torch", "jax"} <= set(here) else "needs both torch and jax"
    tables = {
        f"{framework} on {device}": preference.source(framework, device) or "the static order: nothing was measured"
        for framework, named in devices.items()
        for device in named
    }
    rows: list[Row] = []
    with progress.status("checking the backends"):
        for state in states.values():
            rows += _check(state["name"], state["kind"], devices) if state["reason"] is None else []
    facts = {"versions": versions(), "devices": devices, "tables": tables, "bridge": bridge}
    return facts | {"backends": states, "rows": rows}


def _files() -> list[tuple[str, str, str]]:
    """Returns (label, name, kind of device) for every module of every backend. Some have one each for CPUs and GPUs."""
    files = [(name, kind or "cpu") for name in backends.names() for kind in backends.modules(name)]
    return [(name if kind == "cpu" else f"{name} ({kind})", name, kind) for name, kind in files]


def _devices(framework: str) -> list[str]:
    try:
        return list(devices_of(framework))
    except Exception as error:  # doctor must report a broken installation, not crash on it
        return [f"{type(error).__name__}: {error}"]


def _check(name: str, kind: str, devices: dict[str, list[str]]) -> list[Row]:
    backend = backends.load(name, kind)
    every = dict.fromkeys(device for named in devices.values() for device in named if backend.FORWARD.runs_on(device))
    # A module for one kind of device is checked on that kind, any other module on the first device of this machine.
    present = [device for device in every if len(backends.modules(name)) == 1 or backends.kind_of(device) == kind]
    if not present:
        return []
    # Some kernels take no float32: they are checked in a half dtype.
    half = "bfloat16" if "bfloat16" in backend.FORWARD.dtypes else backend.FORWARD.dtypes[0]
    spec = CHECKED if "float32" in backend.FORWARD.dtypes else replace(CHECKED, dtype=half)
    if not backend.FORWARD.causal or "bottom_right" not in backend.FORWARD.alignments:
        # With equal lengths both alignments agree, so a kernel with top-left only can be checked.
        spec = replace(spec, kv_len=spec.q_len, causal=backend.FORWARD.causal)
    # The claims on this machine, because a build may lack the backward that the backend claims.
    forward = Target.here(next(iter(devices)), present[0]).claims(name)[1] is None
    return list(rows_of(draw(replace(spec, needs_backward=not forward)), present[0], repeats=1, names=(name,)))


def _show(console: Console, findings: dict[str, Any], rows: list[Row]) -> None:
    here = [f"{name} {version}" for name, version in findings["versions"].items() if version is not None]
    absent = [name for name, version in findings["versions"].items() if version is None]
    facts = {
        "versions": ", ".join(here),
        "not installed": ", ".join(absent),
        **{f"{framework} devices": ", ".join(devices) for framework, devices in findings["devices"].items()},
        "bridge": findings["bridge"] or "JAX reaches torch's kernels",
        **{f"choice in {where}": source for where, source in findings["tables"].items()},
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in facts.items():
        if text:
            table.add_row(Text(name), Text(text))
    console.print(table)
    console.print(Text(f"\nbackends, checked with {CHECKED}; with gradients if the backend has them"))
    console.print(_backends_table(findings["backends"], rows))


def _backends_table(findings: dict[str, dict[str, Any]], rows: list[Row]) -> Table:
    """Returns a line for every backend, and one for each framework in which it was checked."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for label, state in findings.items():
        warning = "; never run on a GPU by this project" if state["unproven"] else ""
        table.add_row(Text(label), Text(state["version"] or ""), Text((state["reason"] or "available") + warning))
        for row in (row for row in rows if row.backend == state["name"] and _in_file(row, state["kind"])):
            table.add_row("", Text(f"in {row.framework}"), Text(_verdict(row)))
    return table


def _in_file(row: Row, kind: str) -> bool:
    return len(backends.modules(row.backend)) == 1 or backends.kind_of(row.device) == kind


def _verdict(row: Row) -> str:
    if row.accuracy is None:
        return ("FAILED: " if row.failed else "refused: ") + "; ".join(row.reasons)
    what = "forward and gradients" if row.outcome and "dq" in row.outcome.arrays else "forward"
    word = "WRONG" if row.wrong else "approximate" if row.approximate else "right"
    return f"{what} {word}: {row.accuracy.worst:.2f} of the bound"
