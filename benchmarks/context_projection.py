"""The cost model's estimates for more ranks than were measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel.call import plan_spec
from attn_core.context_parallel.cost.choose import choose
from attn_core.context_parallel.cost.directions import Estimate
from attn_core.context_parallel.cost.estimate import estimate
from attn_core.context_parallel.cost.machine import GIB, Constants
from attn_core.context_parallel.plan import AxisSizes


@dataclass(frozen=True)
class Projection:
    """The cost model's estimate of a call over more ranks than were measured.

    Attributes:
        axes, strategy: the ranks, and their strategy.
        estimate: the cost over these ranks.
        alone: the cost of the whole row on one rank with enough memory.
    """

    axes: AxisSizes
    strategy: str
    estimate: Estimate
    alone: Estimate

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.axes[0] * (self.axes[1] if len(self.axes) == 2 else 1)

    @property
    def efficiency(self) -> tuple[float, float]:
        """The efficiency ``E = T_1 / (P T_P)`` of a forward, and of forward + backward."""
        forward = self.alone.forward.seconds / (self.world * self.estimate.forward.seconds)
        return forward, self.alone.both / (self.world * self.estimate.both)


def project(
    spec: AttentionSpec,
    worlds: Iterable[AxisSizes],
    constants: Constants,
    layout: str = "zigzag",
    strategy: str | None = None,
    memory: float | None = None,
) -> tuple[Projection, ...]:
    """Estimates rows that grow with the number of ranks. These are not measurements.

    Args:
        spec: the call with one rank's part of the row as its lengths.
        worlds: the axes of each projection, see ``choose``.
        strategy: None chooses one for each projection.

    Raises:
        NoStrategyError: if no strategy can run one of the rows.
    """
    projections = []
    for axes in worlds:
        ranks = axes[0] * (axes[1] if len(axes) == 2 else 1)
        whole = replace(spec, q_len=spec.q_len * ranks, kv_len=spec.kv_len * ranks)
        choice = choose(whole, None, layout, axes, constants, memory, strategy)
        alone = estimate(whole, plan_spec(whole, None, "all_gather", "contiguous", (1,)), constants)
        assert choice.strategy is not None and choice.estimate is not None
        projections.append(Projection(axes, choice.strategy, choice.estimate, alone))
    return tuple(projections)


def table(projections: Iterable[Projection]) -> str:
    """Returns projections as a Markdown table."""
    lines = [
        "| ranks | strategy | forward, ms | efficiency | forward + backward, ms | efficiency | GiB a rank |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in projections:
        forward, both = one.efficiency
        name = one.strategy if len(one.axes) == 1 else f"{one.strategy} x ulysses"
        cells = (
            " x ".join(map(str, one.axes)),
            name,
            f"{one.estimate.forward.seconds * 1e3:.0f}",
            f"{forward:.2f}",
            f"{one.estimate.both * 1e3:.0f}",
            f"{both:.2f}",
            f"{one.estimate.peak / GIB:.1f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
