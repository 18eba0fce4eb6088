"""Which strategy a context-parallel call takes where its caller names none."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from torch_frontend.context_ops import Question


def chosen(asked: Question, mesh: DeviceMesh) -> Question:
    """The question with a strategy, its axes, and a number of head groups."""
    ranks = asked.ranks
    strategy = ranks.strategy or "all_gather"
    if strategy == "ulysses" and not ranks.inner:
        ranks = ranks._replace(outer="", inner=ranks.outer)
    return asked._replace(ranks=ranks._replace(strategy=strategy, head_groups=ranks.head_groups or 1))
