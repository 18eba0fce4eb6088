"""The indices that FlashAttention-4's backward passes to score functions of grouped heads.

The backward of 4.0.0b36 does not pack the query heads of a kv head into one tile, but it passes indices as if it did:
``q // group`` for q, and ``h * group + q % group`` for h. For our own functions it passes the true ones, which also
saves the divisions. Other callers' functions get what they got before.
Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute.flash_bwd_sm90``.
"""

from __future__ import annotations

import copy
from typing import Any

from attn_core.backends.shared.cached_once import cached_once

NEEDED = "_attn_core_true_indices"
"""The attribute of a score function that gets true indices."""


@cached_once
def correct() -> None:
    """Corrects the indices for functions with the attribute; once in a process."""
    from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90 as Kernel  # type: ignore[import-not-found]

    for name in ("apply_score_mod", "apply_score_mod_bwd"):
        setattr(Kernel, name, _with_true_indices(getattr(Kernel, name)))


def _with_true_indices(method: Any) -> Any:
    def apply(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if getattr(self.score_mod, NEEDED, False):
            self = copy.copy(self)
            self.qhead_per_kvhead = 1
        return method(self, *arguments, **keywords)

    return apply
