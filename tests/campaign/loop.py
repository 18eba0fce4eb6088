"""The loop of a campaign, in one process or in several: draws cases, runs them, shrinks faults, and keeps everything
in one JSON file."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

from attn_core import backends
from attn_core.cli import insistent_ctrl_c
from attn_core.cli.devices import versions
from attn_core.errors import LayoutWarning, SpecError
from attn_core.selection import Target, choice
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import read_json, write_whole
from tests.campaign import coverage
from tests.campaign.case import Case, case_of, text_of, with_same_documents
from tests.campaign.draw import Place, new_lengths, number_seed, random_choice, structure
from tests.campaign.entries import Entry, entries_of
from tests.campaign.judge import Verdict, fails_alike, verdict_of
from tests.campaign.relations import RELATIONS
from tests.campaign.same_bits import pair_of
from tests.campaign.shrink import shrunk
from tests.campaign.workers import end_with_parent

State = dict[str, Any]
"""The content of a campaign's JSON file."""

BLOCK = 40
"""Cases in a block. They share an entry, and their structure if the entry compiles for it."""

SLOW = ("flex",)
"""Backends that compile for seconds. They run in one block of SLOW_EVERY, in which the cases share their structure."""
SLOW_EVERY = 25

FORMAT = 1
MOST_FAULTS = 100
"""Faults to keep. A campaign with more stops, because one defect fails in thousands of cases."""

CALLS_OF_PROCESS = 10_000
"""Calls of one of several processes, which is then replaced: torch and JAX keep about 100 MB for each 1000 compiled
calls."""
LAST = 10.0
"""Seconds. With less time left, no process starts."""
POLL = 1.0
"""Seconds between two looks at the processes."""

ADDED = ("calls", "skipped")
COUNTED = ("backends", "by entry", "by relation", "both ways", "seconds by entry")


class Part(NamedTuple):
    """The blocks that one of several processes runs: every ``processes``-th from ``number`` on."""

    number: int = 0
    processes: int = 1


class Campaign:
    """A campaign on one device, whose state grows with every case.

    Attributes:
        state: the content of the JSON file.
    """

    def __init__(
        self, seed: int, devices: dict[str, str], names: tuple[str, ...] = (), part: Part | None = None
    ) -> None:
        """Prepares a campaign.

        Args:
            devices: the device of each framework, such as ``{"torch": "cpu", "jax": "cpu"}``.
            names: parts of the names of the entries to run; all entries if empty.
            part: the blocks of this process; all blocks if None.

        Raises:
            SpecError: if no entry has one of the names.
        """
        self.devices = devices
        self.kind, self._part = backends.kind_of(next(iter(devices.values()))), part or Part()
        known = [entry for framework in devices for entry in entries_of(framework).values()]
        everything = [entry for entry in known if self.kind in entry.kinds]
        self.entries = {e.name: e for e in everything if not names or any(name in e.name for name in names)}
        if not self.entries:
            raise SpecError(f"--only: expected a part of one of {', '.join(e.name for e in everything)}")
        self.state: State = {
            "format": FORMAT,
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "seed": seed,
            "devices": devices,
            "device_name": device_name(next(iter(devices.values()))),
            "versions": versions(),
            "entries": sorted(self.entries),
            "only": list(names),
            "part": list(self._part),
            "next": 0,
            "seconds": 0.0,
            "calls": 0,
            "skipped": 0,
            "worst": {"use": 0.0, "case": None},
            "backends": {},
            "by entry": {},
            "by relation": {},
            "both ways": {},
            "seconds by entry": {},
            "faults": [],
        }

    def resume(self, path: Path) -> None:
        """Continues with an earlier file, and records the case in which that process died, if it did.

        Raises:
            SpecError: if the file is no campaign with the same seed, devices, versions and entries.
        """
        before = read_json(path)
        if not isinstance(before, dict):
            raise SpecError(f"{path}: expected a file written by --json")
        for name in ("format", "seed", "devices", "versions", "entries", "part"):
            if before.get(name) != self.state[name]:
                raise SpecError(
                    f"--resume: the file has {name}={before.get(name)}, this run {self.state[name]}; use a new file"
                )
        self.state = before
        with suppress(OSError):
            text = running_file(path).read_text(encoding="utf-8").strip("\0")
            if text:
                number, _, case = text.partition(" ")
                self._fault(case_of(case), Verdict(fault="the process died"), shrink=False)
                self.state["next"] = int(number) + 1

    def run(
        self, seconds: float, path: Path | None, progress: Callable[[State], None], most_calls: float = math.inf
    ) -> None:
        """Runs cases until time is over, enough have run, or too many fail, but at least one.

        Args:
            path: the JSON file, written every few seconds, or None.
            progress: called after every case.
            most_calls: how many calls to run at most.
        """
        began, spent, written = monotonic(), self.state["seconds"], monotonic()
        before = self.state["calls"]
        self._write(path)
        running = None if path is None else os.open(running_file(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for number, case in self.cases(self.state["next"]):
                ran = self.state["calls"] - before
                if self.full or ran >= most_calls or (ran and monotonic() - began > seconds):
                    break
                if running is not None:
                    # So that the next run knows the case if this process dies in it. One write, so never half of it.
                    os.pwrite(running, f"{number} {text_of(case)}".encode().ljust(4096, b"\0"), 0)
                start = monotonic()
                with catch_warnings():
                    simplefilter("ignore", LayoutWarning)  # drawn sizes look like any layout
                    verdict = verdict_of(case, self.devices[self.entries[case.entry].framework])
                took = self.state["seconds by entry"]
                took[case.entry] = took.get(case.entry, 0.0) + monotonic() - start
                self._count(case, verdict)
                self.state |= {"next": number + 1, "seconds": round(spent + monotonic() - began, 1)}
                progress(self.state)
                if monotonic() - written > 5:
                    self._write(path)
                    written = monotonic()
        finally:
            self._write(path)
            if running is not None and path is not None:
                os.close(running)
                # A process that dies never gets here. One that Ctrl-C ends does, and its case is no fault.
                running_file(path).unlink(missing_ok=True)

    def _write(self, path: Path | None) -> None:
        if path is not None:
            write_whole(json.dumps(self.state, indent=1) + "\n", path)

    @property
    def full(self) -> bool:
        """Whether too many cases failed."""
        return len(self.state["faults"]) >= MOST_FAULTS

    def cases(self, first: int) -> Iterator[tuple[int, Case]]:
        """Yields the cases from a number on, without end: (number, case)."""
        number = first
        while True:
            place = Place(self.state["seed"], number // BLOCK, number)
            if place.block % self._part.processes != self._part.number:
                number += BLOCK - number % BLOCK
                continue
            entry = self.entries[random_choice(place, tuple(self.entries))]
            over = number % BLOCK >= entry.share * BLOCK
            case = None if over else self._case(place, entry)
            if case is None and (over or self._shares(place, entry)):
                number += BLOCK - number % BLOCK  # no other case of the block runs
                continue
            if case is not None:
                yield number, case
            number += 1

    def _shares(self, place: Place, entry: Entry) -> bool:
        # On a GPU several backends compile for a structure.
        return entry.shared or self.kind == "cuda" or place.block % SLOW_EVERY == 0

    def _case(self, place: Place, entry: Entry) -> Case | None:
        """Returns the case of a place, or None if its structure does not fit the entry."""
        shares = self._shares(place, entry)
        drawn = place if shares else place._replace(block=place.number + 2**40)
        spec, lengths = structure(drawn, self.kind)
        if spec.dropout and (entry.words is None or self.kind != "cpu"):
            spec = replace(spec, dropout=0.0)  # GPU kernels drop other weights than the reference
        if entry.refuses(spec) is not None:
            return None
        if lengths is not None and place.number % BLOCK and shares:
            lengths = new_lengths(spec, place)
        if lengths is not None and entry.same_documents:
            spec, lengths = with_same_documents(spec, lengths)
        target = Target.here(entry.framework, self.devices[entry.framework])
        backend = random_choice(drawn, ("", *self._able(entry, spec, target, shares))) or None
        relation = None
        if drawn.block % 4 == 0:
            fitting = [name for name, each in RELATIONS.items() if each.takes(spec) and not (shares and each.splits)]
            relation = random_choice(drawn, tuple(fitting)) if fitting else None
        elif backend is not None:
            relation = pair_of(entry.name, place.block, place.number % BLOCK)
        return Case(entry.name, spec, backend, number_seed(place), lengths, relation)

    def _able(self, entry: Entry, spec: Any, target: Target, shares: bool) -> tuple[str, ...]:
        if not entry.requests:
            return ()
        missing = dict(target.unavailable)
        return tuple(
            name
            for name in backends.names()
            if name not in missing
            and (shares or name not in SLOW)
            and not backends.load(name, self.kind).forward_claims.approximate
            and not choice.refusals(name, spec, target)
        )

    def _count(self, case: Case, verdict: Verdict) -> None:
        if verdict.skipped is not None:
            self.state["skipped"] += 1
            return
        self.state["calls"] += 1
        framework = self.entries[case.entry].framework
        coverage.add(self.state["backends"], f"{case.backend or 'automatic choice'} in {framework}", case.spec)
        coverage.add(self.state["by entry"], case.entry, case.spec)
        if case.relation is not None:
            counted = self.state["by relation"]
            counted[case.relation] = counted.get(case.relation, 0) + 1
        if verdict.differing is not None:
            coverage.add_bits(self.state["both ways"], f"{case.relation}, {case.backend}", case.spec, verdict.differing)
        if verdict.fault is not None:
            self._fault(case, verdict, shrink=True)
        elif verdict.use > self.state["worst"]["use"]:
            self.state["worst"] = {"use": round(verdict.use, 3), "case": text_of(case)}

    def _fault(self, case: Case, verdict: Verdict, shrink: bool) -> None:
        device = self.devices[self.entries[case.entry].framework]
        assert verdict.fault is not None
        small = shrunk(case, fails_alike(verdict.fault, device)) if shrink else case
        self.state["faults"].append({"fault": verdict.fault, "case": text_of(case), "shrunk": text_of(small)})


def running_file(path: Path) -> Path:
    """Returns the file that holds the case of a running process."""
    return path.with_name(path.name + ".running")


def run_in_processes(
    campaign: Campaign, count: int, seconds: float, path: Path, resume: bool, progress: Callable[[State], None]
) -> None:
    """Runs a campaign in processes until time is over, and leaves the sums in ``campaign.state``.

    A process that dies is started again, and the case in which it died is a fault.

    Args:
        campaign: gives the seed, the devices and the entries.
        count: the number of processes.
        seconds: how long each process runs. Its start comes on top.
        path: the JSON file of the sums. The state of process i is kept in ``<path>.<i>``.
        resume: whether to continue with those files, if they exist.
        progress: called with the sums about every second.
    """
    files = [path.with_name(f"{path.name}.{number}") for number in range(count)]
    if not resume:
        for file in files:
            file.unlink(missing_ok=True)
    context, began = get_context("spawn"), monotonic()

    def start(number: int, left: float) -> Any:
        names = tuple(campaign.state["only"])
        arguments = (campaign.state["seed"], campaign.devices, names, Part(number, count), left, files[number])
        process = context.Process(target=_run_part, args=arguments, name=f"campaign {number}")
        process.start()
        return process

    def collect() -> State:
        total = merged([campaign.state, *_states(files)])
        write_whole(json.dumps(total, indent=1) + "\n", path)
        return total

    workers = [start(number, seconds) for number in range(count)]
    try:
        while any(worker.is_alive() for worker in workers):
            sleep(POLL)
            for number, (worker, file) in enumerate(zip(workers, files)):
                left = seconds - (monotonic() - began)
                if not worker.is_alive() and left >= LAST and _may_start_again(worker, file):
                    workers[number] = start(number, left)
            progress(collect())
    except BaseException:
        for worker in workers:
            if worker.is_alive():
                os.kill(worker.pid, signal.SIGINT)  # so that it writes its file
        raise
    finally:
        for worker in workers:
            worker.join()
        campaign.state = collect()


def _run_part(
    seed: int, devices: dict[str, str], names: tuple[str, ...], part: Part, seconds: float, path: Path
) -> None:
    end_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background process ignores it
    run = Campaign(seed, devices, names, part)
    if path.exists():
        run.resume(path)
    with suppress(KeyboardInterrupt), insistent_ctrl_c():
        run.run(seconds, path, lambda state: None, CALLS_OF_PROCESS)


def _may_start_again(worker: Any, file: Path) -> bool:
    """Returns whether a process that ended has room for more faults.

    Raises:
        SpecError: if it died outside a call, as its successor would.
    """
    if worker.exitcode != 0 and not running_file(file).exists():
        raise SpecError(f"--processes: {worker.name} ended with exit code {worker.exitcode}")
    return all(len(state["faults"]) < MOST_FAULTS for state in _states([file]))


def _states(files: list[Path]) -> list[State]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def merged(states: list[State]) -> State:
    """Returns the sum of several campaigns' states. The first gives the date, the seed, the device and the versions."""
    total: State = json.loads(json.dumps(states[0]))
    for state in states[1:]:
        for name in ADDED:
            total[name] += state[name]
        for name in COUNTED:
            add_counts(total[name], state[name])
        total["seconds"] = max(total["seconds"], state["seconds"])
        total["faults"] += state["faults"]
        if state["worst"]["use"] > total["worst"]["use"]:
            total["worst"] = state["worst"]
    return total


def add_counts(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds counts to others in place; both may be nested."""
    for key, value in more.items():
        if isinstance(value, dict):
            add_counts(total.setdefault(key, {}), value)
        else:
            total[key] = total.get(key, 0) + value
