"""The loop of ``attn bench``: measures every case in both directions on every backend, and collects plain data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import attn_core
from attn_core import backends
from attn_core.call.arithmetic import flops
from attn_core.call.masks import as_called
from attn_core.call.spec import AttentionSpec
from attn_core.cli import bench_jax, bench_torch
from attn_core.cli.bench_timing import DeviceLostError, Entry, Timing, measure
from attn_core.cli.frameworks import versions
from attn_core.errors import SpecError
from attn_core.selection import Target, choice
from attn_core.selection.sweep import SweepCase, plain_fields
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import read_json, write_whole

MOST_SCORES = 2**28
"""From this many scores on, the math backend is timed only if nothing else runs the case: it may store every score."""

FLEX_EVERY = {"cuda": 4, "cpu": 6}
"""Compiling FlexAttention takes seconds per kind of call, so it is timed in one of so many calls, or on request. It is
not timed if one of INSTEAD_OF_FLEX runs the call, because they are faster."""

INSTEAD_OF_FLEX = ("flash3", "flash4", "sdpa_cudnn")

Record = dict[str, Any]


class Sweep:
    """A sweep over cases, whose raw data grows with every case.

    Attributes:
        raw: the content of the raw JSON file.
        target: the measured installation and device.
    """

    def __init__(
        self, device: str, names: tuple[str, ...], rounds: int, everything: bool, framework: str = "torch"
    ) -> None:
        self.target = Target.here(framework, device)
        for name in names:
            _check_exact(name, self.target)
        self.names, self.rounds, self.everything = names or candidates(self.target), rounds, everything
        self.raw = self._head()

    def _head(self) -> dict[str, Any]:
        return {
            "format": 1,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "framework": self.target.framework,
            "device": self.target.device,
            "device_name": device_name(self.target.device),
            "versions": versions(),
            "backends": list(self.names),
            "unavailable": dict(self.target.unavailable),
            "builds": {name: asdict(build) for name, build in self.target.builds},
            "rounds": self.rounds,
            "seconds": 0.0,
            "cases": [],
        }

    def resume(self, before: dict[str, Any]) -> None:
        """Continues with the content of an earlier raw file.

        Raises:
            SpecError: if the file was measured with other versions, options or devices.
        """
        # Times from another installation or GPU cannot be compared with the times of this run.
        for name in ("format", "framework", "device", "device_name", "versions", "builds", "rounds", "backends"):
            now = json.loads(json.dumps(self.raw[name]))  # turns tuples into lists, as in the file
            if before.get(name) != now:
                raise SpecError(
                    f"--resume: the file has {name}={before.get(name)}, this run {now}; write to a new file instead"
                )
        self.raw = before

    def run(self, cases: Iterable[SweepCase], seconds: float | None, done: Callable[[Record], None]) -> bool:
        """Measures the remaining cases. Returns False if time ran out before the last one.

        Args:
            seconds: the time after which no new case starts; None for no limit.
            done: called with the record of each case.

        Raises:
            DeviceLostError: if a kernel broke the device. The raw data has all cases so far, and names the backend.
        """
        # A resumed sweep adds its time to the time of earlier runs.
        began, spent = perf_counter(), self.raw["seconds"]
        for case, direction in self.remaining(cases):
            if seconds is not None and perf_counter() - began > seconds:
                return False
            spec = replace(as_called(case.spec), needs_backward=direction == "training")
            try:
                record = self._record(case, spec, direction)
            finally:
                self.raw["seconds"] = round(spent + perf_counter() - began, 1)
            done(record)
        return True

    def remaining(self, cases: Iterable[SweepCase]) -> Iterator[tuple[SweepCase, str]]:
        """Yields the cases with each of their directions, without those that the raw data has."""
        finished = {(record["name"], record["direction"]) for record in self.raw["cases"]}
        for case in cases:
            for direction in ("forward", "training") if case.training else ("forward",):
                if (case.name, direction) not in finished:
                    yield case, direction

    def _record(self, case: SweepCase, spec: AttentionSpec, direction: str) -> Record:
        began = perf_counter()
        entries = self._refused(spec)
        able = [name for name in self.names if name not in entries]
        entries |= self._skipped(case, spec, able)
        work = flops(spec, case.lengths)
        record: Record = {
            "name": case.name,
            "direction": direction,
            "spec": plain_fields(case.spec),
            "lengths": case.lengths and list(case.lengths),
            "gigaflop": round(work / 1e9, 6),
            "selected": attn_core.explain(spec, self.target).backend,
        }
        # The automatic order, so that the first result comes from a fast backend and slow ones are recognised.
        timed = [name for name in self.names if name in able and name not in entries]
        beside = self._beside(spec)
        try:
            timing = self._timing(case, spec, timed + beside)
        except DeviceLostError as error:
            culprit = str(error).partition(":")[0]  # the message starts with the backend's name
            # Only the culprit failed: the other backends lost their times with the device.
            lost = {name: {"skipped": f"{culprit} broke the device"} for name in timed}
            self._append(record, entries | lost | {culprit: {"failed": str(error)}}, None, began)
            raise
        for entry in timing.entries.values():
            if "median" in entry:
                entry["tflops"] = float(f"{work / 1e6 / entry['median']:.4g}")
        if beside:
            record["beside"] = {name: timing.entries.pop(name) for name in beside}
        return self._append(record, timing.entries | entries, timing.reference, began)

    def _append(self, record: Record, entries: dict[str, Entry], reference: str | None, began: float) -> Record:
        duration = {"reference": reference, "seconds": round(perf_counter() - began, 2)}
        self.raw["cases"].append(record | duration | {"backends": entries})
        return self.raw["cases"][-1]

    def _timing(self, case: SweepCase, spec: AttentionSpec, names: list[str]) -> Timing:
        import torch

        device = torch.device("cpu" if self.target.device == "cpu" or self._in_jax else "cuda")
        run = bench_jax.caller(case, spec, names) if self._in_jax else bench_torch.caller(case, spec, device)
        return measure(run, names, self.rounds, device)

    def _beside(self, spec: AttentionSpec) -> list[str]:
        """Returns the framework's own functions, if they can run the call."""
        if self._in_jax:
            own = [bench_jax.JAX_NN] + [bench_jax.JAX_NN_CUDNN] * (self.target.device != "cpu")
            return own if bench_jax.has_jax_nn(spec) else []
        return [bench_torch.SDPA] if bench_torch.has_sdpa(spec) else []

    @property
    def _in_jax(self) -> bool:
        return self.target.framework == "jax"

    def _refused(self, spec: AttentionSpec) -> dict[str, Entry]:
        reasons = {name: choice.refusals(name, spec, self.target) for name in self.names}
        return {name: {"refused": list(why)} for name, why in reasons.items() if why}

    def _skipped(self, case: SweepCase, spec: AttentionSpec, able: list[str]) -> dict[str, Entry]:
        """Returns entries for backends that are too slow for the sweep; the raw data records the reason."""
        entries: dict[str, Entry] = {}
        others = [name for name in able if name not in ("math", "flex")]
        scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
        if "math" in able and others and scores >= MOST_SCORES:
            entries["math"] = {"skipped": f"{scores:.1e} scores, all of which it stores; other backends run this case"}
        every = FLEX_EVERY[self.target.kind]
        needed = not any(name in able for name in INSTEAD_OF_FLEX) and case.number % every == 0
        if "flex" in able and not (self.everything or needed or able == ["flex"]):
            entries["flex"] = {
                "skipped": f"compiles for seconds; timed in one of {every} calls, if the others are slow"
            }
        return entries


def candidates(target: Target) -> tuple[str, ...]:
    """Returns the backends to measure on a target: the installed candidates of automatic choice, best first."""
    return tuple(
        name
        for name in backends.usual_order(target.framework, target.kind)
        if name not in dict(target.unavailable) and backends.load(name, target.kind).FORWARD.runs_on(target.device)
    )


def _check_exact(name: str, target: Target) -> None:
    if backends.load(name, target.kind).FORWARD.approximate:
        raise SpecError(
            f"--backend={name}: expected an exact backend, because approximate ones are never chosen automatically; "
            "`attn compare` shows their error"
        )


def read(path: Path) -> dict[str, Any]:
    """Reads a raw file.

    Raises:
        SpecError: if the file cannot be read or was not written by ``attn bench --json``.
    """
    raw = read_json(path)
    if not isinstance(raw, dict) or raw.get("format") != 1:
        raise SpecError(f"{path}: expected a file written by `attn bench --json`")
    kinds: dict[str, Any] = {"seconds": (int, float), "cases": list}
    for name, kind in kinds.items():
        if not isinstance(raw.get(name), kind):
            raise SpecError(f"{path}: {name}={raw.get(name)!r}: expected what `attn bench --json` writes")
    for case in raw["cases"]:
        if not isinstance(case, dict) or not {"name", "direction"} <= case.keys():
            raise SpecError(f"{path}: cases: expected the name and the direction of each, got {str(case)[:80]}")
    return raw


def write(data: dict[str, Any], path: Path) -> None:
    """Writes JSON with one line per case, so that diffs of two files are readable."""
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in data.items() if name != "cases"]
    cases = ",\n".join("  " + json.dumps(case) for case in data["cases"])
    write_whole("{\n" + "".join(f" {line},\n" for line in head) + f' "cases": [\n{cases}\n ]\n}}\n', path)
