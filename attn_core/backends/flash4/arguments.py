"""The keywords of FlashAttention-4's entry points that follow from the spec alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.flash4 import masked
from attn_core.backends.flash4.operands import window
from attn_core.call.spec import AttentionSpec


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's keywords for "forward" and "backward", and the softcap, which needs score functions."""
    left, right = (None, None) if masked.by_blocks(spec) else window(spec)
    causal = left is None and right == 0
    both = {
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
        "max_seqlen_q": spec.max_len_q,
        "max_seqlen_k": spec.max_len_k,
    }
    scale = spec.scale or 1.0  # never None in a spec
    return {
        "forward": {"softmax_scale": scale / (spec.softcap or 1.0), **both},  # see softcap.py for the division
        "backward": {"softmax_scale": scale, "deterministic": spec.deterministic, **both},
        "softcap": spec.softcap,
    }


@lru_cache(maxsize=4096)
def keywords(spec: AttentionSpec, half: str) -> dict[str, Any]:
    """Returns the keywords of a direction's kernel that are no tensors; half: "forward" or "backward"."""
    how = lower(spec)
    if spec.score_mod is not None:
        return {**how[half], **masked.score_keywords(spec, half)}
    if how["softcap"] is None:
        return how[half]
    from attn_core.backends.flash4.softcap import score_functions

    functions = score_functions(how["softcap"])
    if half == "forward":
        return {**how[half], "score_mod": functions.forward}
    return {**how[half], "score_mod": functions.recompute, "score_mod_bwd": functions.gradient}
