"""Constants: what a machine's kernels, memory and links do in a second, as data measured on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from attn_core.errors import SpecError

GIB, MIB = 2.0**30, 2.0**20

LINKS = ("ring", "all_gather", "all_to_all")
"""The exchanges: each rank sends to its neighbour; everybody gets everything; everybody has something for everybody."""

MEASURED = "sm90"
"""Whose figures stand where nothing was measured, so that a laptop chooses as that GPU would."""


@dataclass(frozen=True)
class Constants:
    """The figures of ``estimate.py``. The files in ``constants/`` say where each comes from.

    Attributes:
        device, device_name: where they were measured.
        forward_tflops, backward_tflops: matrix products of the kernels, 10^12 floating-point operations a second, once
            reading and writing is taken off; of 16-bit types.
        backward_traffic: how many times the bytes of its operands and results a backward moves.
        call_us: a kernel's launch and its ends, microseconds.
        memory_gib_s: what the device's own memory moves, reads and writes together.
        links: for each of LINKS ``((MiB that a rank receives, GiB/s), ...)``, rising.
        overlap: of two things done at once, how much of the shorter comes on top of the longer: 0 none, 1 all of it.
        ranks_per_host: how many ranks those links join.
        network_gib_s: what a rank receives from another host.
    """

    device: str
    device_name: str
    forward_tflops: float
    backward_tflops: float
    backward_traffic: float
    call_us: float
    memory_gib_s: float
    links: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]
    overlap: float
    ranks_per_host: int
    network_gib_s: float

    def __post_init__(self) -> None:
        if sorted(name for name, _ in self.links) != sorted(LINKS):
            raise SpecError(f"links: expected {', '.join(LINKS)}, got {', '.join(name for name, _ in self.links)}")
        for name, rows in self.links:
            sizes, times = [size for size, _ in rows], [size / rate for size, rate in rows]
            if not rows or sizes != sorted(set(sizes)) or times != sorted(times):
                raise SpecError(f"links: {name}: expected rising sizes that take rising times, got {rows}")

    @classmethod
    def of(cls, device: str) -> Constants:
        """The figures of a device such as "sm90"; those of MEASURED where there are none."""
        return _read(device)

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Constants:
        """The figures of a file's table; what the file says beside them is left out."""
        named = {name: table[name] for name in cls.__dataclass_fields__}
        rows = tuple((kind, tuple(map(tuple, found))) for kind, found in table["links"].items())
        return cls(**{**named, "links": rows})

    def moved(self, size: float) -> float:
        """Seconds in which the device's memory moves bytes."""
        return size / (self.memory_gib_s * GIB)

    def received(self, kind: str, size: float, from_hosts: float = 0.0) -> float:
        """Seconds in which a rank receives bytes by one of LINKS; ``from_hosts`` of them from other hosts.

        Between measured sizes the time is a straight line; below the least it is that one's, which is all latency;
        above the largest the rate stays. Bytes from other hosts come at the network's rate, at the same time.
        """
        if not size:
            return 0.0
        rows = [(mib * MIB, mib * MIB / (rate * GIB)) for mib, rate in dict(self.links)[kind]]
        largest, longest = rows[-1]
        seconds = max(rows[0][1], size / largest * longest if size > largest else 0.0)
        for (low, before), (high, after) in pairwise(rows):
            if low < size <= high:
                seconds = before + (after - before) * (size - low) / (high - low)
        return max(seconds, from_hosts / (self.network_gib_s * GIB))

    def together(self, one: float, other: float) -> float:
        """Seconds that two things take which are done at once."""
        return max(one, other) + self.overlap * min(one, other)


@cache
def _read(device: str) -> Constants:
    folder = files("attn_core.context_parallel.cost") / "constants"
    file = folder / f"{device}.json"
    if not file.is_file():
        file = folder / f"{MEASURED}.json"
    return Constants.from_table(json.loads(file.read_text(encoding="utf-8")))
