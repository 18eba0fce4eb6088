"""Attention over the ranks of torch.distributed, each holding a part of every row."""

from importlib import import_module
from typing import Any

PUBLIC = {
    "context_parallel_attention": "attention",
    "explain_context_parallel": "attention",
    "shard_lengths": "shards",
    "shard_sequence": "shards",
    "unshard_sequence": "shards",
}
"""The public names and their modules. They load at first use, because torch can be built without torch.distributed."""


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(import_module(f"{__name__}.{PUBLIC[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
