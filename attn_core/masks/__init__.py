"""Masks as ranges: constructors of the argument ``key_ranges`` for the masks that models use.

Each returns int32 numpy ``[batch or 1, kv_heads or 1, keys, ranges, 2]``: for each key the half-open ranges of queries
that see it, which ``attention(..., key_ranges=)`` of both frontends takes as it is. ``attn_core.call.key_ranges``
defines them.
"""

from attn_core.masks.convert import from_flashmask
from attn_core.masks.rows import blocks, documents, global_and_window, prefix_lm
from attn_core.masks.trees import block_diffusion, shared_prefix, tree

__all__ = [
    "block_diffusion",
    "blocks",
    "documents",
    "from_flashmask",
    "global_and_window",
    "prefix_lm",
    "shared_prefix",
    "tree",
]
