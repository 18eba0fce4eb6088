"""The cost model: what a plan takes in seconds and bytes, and which strategy is the fastest."""

from attn_core.context_parallel.cost.estimate import Estimate

__all__ = ["Estimate"]
