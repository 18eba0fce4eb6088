"""Constants: the measured rates of a machine's kernels, memory and links."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any

from attn_core.errors import SpecError

GIB, MIB = 2.0**30, 2.0**20

LINKS = ("ring", "all_gather", "all_to_all")
"""The kinds of exchange. In a ring, each rank sends to the next one."""

WIDE = 128
"""The most channels of a head for which kernels reach their full rate."""

MEASURED = "sm90"
"""The device whose figures stand in for devices without measurements, so that a laptop chooses as that GPU would."""


@dataclass(frozen=True)
class Constants:
    """The figures that ``estimate.py`` uses. The files in ``constants/`` name the source of each.

    Attributes:
        device, device_name: where they were measured.
        forward_tflops, backward_tflops: rates of the kernels' matrix products for 16-bit types, 10^12 floating-point
            operations a second, without the time for memory.
        backward_traffic: bytes that a backward moves, as a multiple of its operands and results.
        call_us: the microseconds in which a kernel starts and ends.
        memory_gib_s: the rate of the device's memory, reads and writes together.
        links: for each of LINKS ``((MiB that a rank receives, GiB/s), ...)``, in ascending order.
        overlap: the share of the shorter of two concurrent operations that prolongs the longer one: 0 none, 1 all.
        ranks_per_host: the number of ranks that the links connect.
        network_gib_s: the rate at which a rank receives from other hosts.
        softcap, wide: how many times as long the matrix products of a forward and of a backward take with a softcap,
            and with more than WIDE channels.
        host_us: the microseconds in which the host launches a forward over ranks: for the call, for each tile of a
            rank, and for a gather of keys; all 0 if a program launches it.
        host_backward: how many times as long the host launches a backward.
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
    softcap: tuple[float, float] = (1.0, 1.0)
    wide: tuple[float, float] = (1.0, 1.0)
    host_us: tuple[float, float, float] = (0.0, 0.0, 0.0)
    host_backward: float = 1.0

    def __post_init__(self) -> None:
        if sorted(name for name, _ in self.links) != sorted(LINKS):
            raise SpecError(f"links: expected {', '.join(LINKS)}, got {', '.join(name for name, _ in self.links)}")
        for name, rows in self.links:
            sizes, times = [size for size, _ in rows], [size / rate for size, rate in rows]
            # Times that fall with the size would make a larger exchange look cheaper, and change which strategy wins.
            if not rows or sizes != sorted(set(sizes)) or times != sorted(times):
                raise SpecError(f"links: {name}: expected rising sizes that take rising times, got {rows}")

    @classmethod
    @cache
    def of(cls, device: str) -> Constants:
        """Returns the figures of a device such as "sm90"; if it has none, the figures of MEASURED."""
        folder = files("attn_core.context_parallel.cost") / "constants"
        file = folder / f"{device}.json"
        file = file if file.is_file() else folder / f"{MEASURED}.json"
        return cls.from_table(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def from_table(cls, table: dict[str, Any]) -> Constants:
        """Returns the figures of a file's table; ignores other entries."""
        named = {name: table[name] for name in cls.__dataclass_fields__}
        named = {name: tuple(value) if isinstance(value, list) else value for name, value in named.items()}
        links = tuple((kind, tuple(map(tuple, rows))) for kind, rows in table["links"].items())
        return cls(**{**named, "links": links})

    def without_host(self) -> Constants:
        """Returns the figures for a program that launches its kernels itself, such as JAX's."""
        return replace(self, host_us=(0.0, 0.0, 0.0))

    def host_seconds(self, tiles: int, gathers: int, *, backward: bool) -> float:
        """Returns the seconds in which a rank's host launches a call. Other exchanges count as several gathers."""
        call, tile, gather = self.host_us
        return (call + tile * tiles + gather * gathers) * 1e-6 * (self.host_backward if backward else 1.0)

    def memory_seconds(self, size: float) -> float:
        """Returns the seconds to move bytes through the device's memory."""
        return size / (self.memory_gib_s * GIB)

    def link_seconds(self, kind: str, size: float, from_hosts: float = 0.0) -> float:
        """Returns the seconds in which a rank receives bytes by one of LINKS, ``from_hosts`` of them from other hosts.

        Interpolates the time linearly between measured sizes. Below the smallest size the time is constant (latency).
        Above the largest size the rate is constant. Bytes from other hosts arrive at the network's rate, at the same
        time.
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

    def overlapped_seconds(self, one: float, other: float) -> float:
        """Returns the seconds that two concurrent operations take together."""
        return max(one, other) + self.overlap * min(one, other)
