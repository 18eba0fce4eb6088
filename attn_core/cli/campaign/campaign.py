"""The loop of a campaign: draws cases, runs them, shrinks faults, and keeps everything in one JSON file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

from attn_core import backends
from attn_core.cli.campaign import coverage
from attn_core.cli.campaign.case import Case, case_of, text_of
from attn_core.cli.campaign.documents import with_same_documents
from attn_core.cli.campaign.draw import Place, new_lengths, number_seed, random_choice, structure
from attn_core.cli.campaign.entries import Entry, entries_of
from attn_core.cli.campaign.judge import Verdict, fails_alike, verdict_of
from attn_core.cli.campaign.relations import RELATIONS
from attn_core.cli.campaign.same_bits import pair_of
from attn_core.cli.campaign.shrink import shrunk
from attn_core.cli.frameworks import versions
from attn_core.errors import LayoutWarning, SpecError
from attn_core.selection import Target, choice
from attn_core.selection.tables import device_name
from attn_core.selection.whole_file import names_file, read_json, write_whole

BLOCK = 40
"""Cases in a block. They share an entry, and their structure if the entry compiles for it."""

SLOW = ("flex",)
"""Backends that compile for seconds. They run in one block of SLOW_EVERY, in which the cases share their structure."""
SLOW_EVERY = 25

FORMAT = 1
MOST_FAULTS = 100
"""Faults to keep. A campaign with more stops, because one defect fails in thousands of cases."""


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
        self.state: dict[str, Any] = {
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
            raise SpecError(f"{path}: expected a file written by `attn campaign --json`")
        for name in ("format", "seed", "devices", "versions", "entries", "part"):
            if before.get(name) != self.state[name]:
                raise SpecError(
                    f"--resume: the file has {name}={before.get(name)}, this run {self.state[name]}; use a new file"
                )
        self.state = before
        with suppress(OSError):
            text = running_file(path).read_text(encoding="utf-8").strip("\0 \n")
            if text:
                number, _, case = text.partition(" ")
                self._fault(case_of(case), Verdict(fault="the process died"), shrink=False)
                self.state["next"] = int(number) + 1

    def run(
        self, seconds: float, path: Path | None, advance: Callable[[Verdict], None], most_calls: float = math.inf
    ) -> None:
        """Runs cases until time is over, enough have run, or too many fail, but at least one.

        Args:
            path: the JSON file, written every few seconds, or None.
            advance: called after every case.
            most_calls: how many calls to run at most.
        """
        began, spent, written = monotonic(), self.state["seconds"], monotonic()
        before = self.state["calls"]
        descriptor = None
        if path is not None:
            write_whole(json.dumps(self.state, indent=1) + "\n", path)
            with names_file(path):
                descriptor = os.open(running_file(path), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for number, case in self.cases(self.state["next"]):
                ran = self.state["calls"] - before
                if self.full or ran >= most_calls or (ran and monotonic() - began > seconds):
                    break
                if descriptor is not None and path is not None:
                    # So that the next run knows the case if this process dies in it.
                    with names_file(running_file(path)):
                        os.pwrite(descriptor, f"{number} {text_of(case)}".encode().ljust(4096, b"\0"), 0)
                start = monotonic()
                with catch_warnings():
                    simplefilter("ignore", LayoutWarning)  # drawn sizes look like any layout
                    verdict = verdict_of(case, self.devices[self.entries[case.entry].framework])
                took = self.state["seconds by entry"]
                took[case.entry] = took.get(case.entry, 0.0) + monotonic() - start
                self._count(case, verdict)
                self.state |= {"next": number + 1, "seconds": round(spent + monotonic() - began, 1)}
                advance(verdict)
                if path is not None and monotonic() - written > 5:
                    write_whole(json.dumps(self.state, indent=1) + "\n", path)
                    written = monotonic()
        finally:
            if descriptor is not None and path is not None:
                os.close(descriptor)
                write_whole(json.dumps(self.state, indent=1) + "\n", path)
                # A process that dies never gets here. One that Ctrl-C ends does, and its case is no fault.
                running_file(path).unlink(missing_ok=True)

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
            and not backends.load(name, self.kind).FORWARD.approximate
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
