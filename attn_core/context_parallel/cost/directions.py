"""Estimate: the cost of a call on one rank, of its forward and its backward, in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from attn_core.context_parallel.cost.machine import GIB


class DirectionCost(NamedTuple):
    """The cost of a forward or of a backward on one rank.

    Attributes:
        device: the seconds of the rank's device.
        exposed: seconds in which the device computes nothing, because it waits for an exchange.
        peak: the peak number of bytes.
        host: the seconds in which the host launches the call.
    """

    device: float
    exposed: float
    peak: float
    host: float

    @property
    def seconds(self) -> float:
        """The seconds in all: a short call takes as long as the host needs to launch it."""
        return max(self.device, self.host)


@dataclass(frozen=True)
class Estimate:
    """The cost of a call on one rank.

    Attributes:
        forward, backward: the cost of each direction.
        training: whether the call has a backward.
    """

    forward: DirectionCost
    backward: DirectionCost
    training: bool

    @property
    def both(self) -> float:
        """The seconds of a forward and a backward."""
        return self.forward.seconds + self.backward.seconds

    @property
    def seconds(self) -> float:
        """The seconds of the call, with its backward if it has one."""
        return self.both if self.training else self.forward.seconds

    @property
    def order(self) -> tuple[float, float]:
        """What is compared with other estimates: the seconds, and if they are the host's, those of the device."""
        return self.seconds, self.forward.device + (self.backward.device if self.training else 0.0)

    @property
    def exposed(self) -> float:
        """The seconds of the call in which the rank computes nothing."""
        return self.forward.exposed + (self.backward.exposed if self.training else 0.0)

    @property
    def peak(self) -> float:
        """The peak number of bytes of the call on a rank, with inputs and results."""
        return max(self.forward.peak, self.backward.peak) if self.training else self.forward.peak

    def __str__(self) -> str:
        what = "forward + backward" if self.training else "forward"
        waiting = f"{self.exposed * 1e3:.2f} ms of it exchanging"
        if self.forward.host > self.forward.device or (self.training and self.backward.host > self.backward.device):
            waiting += ", as long as the host takes to launch it"
        return f"{self.seconds * 1e3:.2f} ms {what}, {waiting}, {self.peak / GIB:.2f} GiB a rank"
