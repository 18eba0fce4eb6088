"""Attention over the devices of a mesh, each holding a part of every row."""

from jax_frontend.context_parallel.attention import context_parallel_attention, explain_context_parallel
from jax_frontend.context_parallel.shards import shard_sequence, unshard_sequence

__all__ = ["context_parallel_attention", "explain_context_parallel", "shard_sequence", "unshard_sequence"]
