"""What a plan costs in seconds and bytes, and which strategy is cheapest."""

from attn_core.context_parallel.cost.estimate import Estimate

__all__ = ["Estimate"]
