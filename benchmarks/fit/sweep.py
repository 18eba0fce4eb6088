"""Times random calls in both directions on every backend of this machine, and stores the raw times.

    python -m benchmarks.fit.sweep --json times.json                    # on the GPU, or on the CPU if there is none
    python -m benchmarks.fit.sweep --json times.json --seconds 600      # starts no new call after that time
    python -m benchmarks.fit.sweep --json times.json                    # again: measures what the file does not have

The backends of a call take turns, beside the framework's own function (attn_core/cli/timing.py). An older time from the
same file must have been measured with the same versions on the same device.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

from attn_core import backends, explain
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.compare import timed
from attn_core.cli.devices import versions
from attn_core.cli.timing import DeviceLostError, Entry
from attn_core.cli.trial import draw
from attn_core.cli.tune import device_of
from attn_core.errors import SpecError
from attn_core.selection import Target, choice
from attn_core.selection.tables import device_name
from benchmarks.fit.calls import SweepCase, as_called, flops, random_calls
from benchmarks.fit.records import Record, plain_fields, read, right_times, write

MOST_SCORES = 2**28
"""From this many scores on, the math backend is timed only if nothing else runs the case: it may store every score."""

FLEX_EVERY = {"cuda": 4, "cpu": 6}
"""Compiling FlexAttention takes seconds per kind of call, so it is timed in one of so many calls, or on request. It is
not timed if one of INSTEAD_OF_FLEX runs the call, because they are faster."""

INSTEAD_OF_FLEX = ("flash3", "flash4", "sdpa_cudnn")


class Sweep:
    """A sweep over cases, whose raw data grows with every case.

    Attributes:
        raw: the content of the raw JSON file.
        target: the measured installation and device.
    """

    def __init__(self, device: str, rounds: int, framework: str = "torch", names: Sequence[str] = ()) -> None:
        self.target, self.rounds = Target.here(framework, device), rounds
        self.names = tuple(names) or candidates(self.target)
        self.raw: dict[str, Any] = {
            "format": 1,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "framework": framework,
            "device": device,
            "device_name": device_name(device),
            "versions": versions(),
            "backends": list(self.names),
            "unavailable": dict(self.target.unavailable),
            "builds": {name: asdict(build) for name, build in self.target.builds},
            "rounds": rounds,
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
                raise SpecError(f"the file has {name}={before.get(name)}, this run {now}; write to a new file instead")
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
        reasons = {name: choice.refusals(name, spec, self.target) for name in self.names}
        entries: dict[str, Entry] = {name: {"refused": list(why)} for name, why in reasons.items() if why}
        able = [name for name in self.names if name not in entries]
        entries |= self._skipped(case, spec, able)
        record: Record = {
            "name": case.name,
            "direction": direction,
            "spec": plain_fields(case.spec),
            "lengths": case.lengths and list(case.lengths),
            "gigaflop": round(flops(spec, case.lengths) / 1e9, 6),
            "selected": explain(spec, self.target).backend,
        }
        # The automatic order, so that the first result comes from a fast backend and slow ones are recognised.
        names = [name for name in able if name not in entries]
        info = None if case.lengths is None else SeqInfo.from_lengths(case.lengths)
        try:
            times = timed(draw(spec, info), self.target.framework, self.target.device, names, self.rounds)
        except DeviceLostError as error:
            culprit = str(error).partition(":")[0]  # the message starts with the backend's name
            # Only the culprit failed: the other backends lost their times with the device.
            lost: dict[str, Entry] = {name: {"skipped": f"{culprit} broke the device"} for name in names}
            self._append(record, entries | lost | {culprit: {"failed": str(error)}}, began)
            raise
        for name in names:
            if not backends.load(name, self.target.kind).modelled(spec):
                times[name]["modelled"] = False
        if beside := {name: entry for name, entry in times.items() if name not in names}:
            record["beside"] = beside
        return self._append(record, {name: times[name] for name in names} | entries, began)

    def _append(self, record: Record, entries: dict[str, Entry], began: float) -> Record:
        self.raw["cases"].append(record | {"seconds": round(perf_counter() - began, 2), "backends": entries})
        return self.raw["cases"][-1]

    def _skipped(self, case: SweepCase, spec: AttentionSpec, able: list[str]) -> dict[str, Entry]:
        """Returns entries for backends that are too slow for the sweep; the raw data records the reason."""
        entries: dict[str, Entry] = {}
        others = [name for name in able if name not in ("math", "flex")]
        scores = spec.batch * spec.num_heads * spec.q_len * spec.kv_len
        if "math" in able and others and scores >= MOST_SCORES:
            entries["math"] = {"skipped": f"{scores:.1e} scores, all of which it stores; other backends run this case"}
        every = FLEX_EVERY[self.target.kind]
        needed = not any(name in able for name in INSTEAD_OF_FLEX) and case.number % every == 0
        for name in able:
            kernel = backends.load(name, self.target.kind)
            if kernel.timing.compiles_for_seconds and not kernel.modelled(spec):
                entries[name] = {"skipped": "compiles for seconds; other kernels have heads of this width"}
        if "flex" in able and not (needed or able == ["flex"]):
            entries["flex"] = {
                "skipped": f"compiles for seconds; timed in one of {every} calls, if the others are slow"
            }
        return entries


def candidates(target: Target) -> tuple[str, ...]:
    """Returns the backends to measure on a target: the installed candidates of automatic choice, best first."""
    return tuple(
        name
        for name in backends.usual_order(target.framework, target.kind)
        if name not in dict(target.unavailable)
        and backends.load(name, target.kind).forward_claims.runs_on(target.device)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the calls of a seed, prints a line for each, and writes the raw times after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit.sweep")
    parser.add_argument("--json", type=Path, required=True, help="the raw times; a file that exists is continued")
    parser.add_argument("--device", help="cpu, or cuda (the GPU here); by default the GPU, else cpu")
    parser.add_argument("--framework", default="torch", help="torch or jax")
    parser.add_argument("--calls", type=int, default=350)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="start no new call after this time")
    options = parser.parse_args(arguments)

    def done(record: Record) -> None:
        times = sorted((time, name) for name, time in right_times(record).items())
        shown = ", ".join(f"{name} {time:.0f}" for time, name in times)
        print(f"{record['name']} ({record['direction']}), µs: {shown}", flush=True)
        write(sweep.raw, options.json)

    try:
        sweep = Sweep(device_of(options.device, options.framework), options.rounds, options.framework)
        if options.json.exists():
            sweep.resume(read(options.json))
    except SpecError as error:
        parser.error(str(error))
    try:
        sweep.run(islice(random_calls(options.seed, sweep.target.kind), options.calls), options.seconds, done)
    finally:
        write(sweep.raw, options.json)  # with the backend that broke the device, if one did


if __name__ == "__main__":
    main()
