"""The keywords of FlashAttention-4's entry points that follow from the spec alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from attn_core.backends.flash4 import masked
from attn_core.backends.flash4.operands import window
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec

LARGEST_TILE = 256
"""The most query rows of a tile on sm90."""


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's keywords for "forward" and "backward", and the softcap, which needs score functions."""
    left, right = (None, None) if masked.by_blocks(spec) else window(spec)
    causal = left is None and right == 0
    longest = spec.max_len_q
    if spec.invariant is not None and longest is not None:
        longest = max(longest, LARGEST_TILE + 1)  # for fewer queries the kernel takes a tile of their size
    both = {
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
        "max_seqlen_q": longest,
        "max_seqlen_k": spec.max_len_k,
    }
    scale = spec.scale or 1.0  # never None in a spec
    # Parts of the keys, and sums in any order, would depend on the batch.
    whole = {} if spec.invariant is None else {"num_splits": 1}
    ordered = spec.deterministic or spec.invariant is not None
    tiled = {"window_size_left": spec.kv_len} if _needs_small_tiles(spec, left, right) else {}
    return {
        "forward": {"softmax_scale": scale / (spec.softcap or 1.0), **whole, **both},  # softcap.py: why divided
        "backward": {"softmax_scale": scale, "deterministic": ordered, **both, **tiled},
        "softcap": spec.softcap,
    }


def _needs_small_tiles(spec: AttentionSpec, left: int | None, right: int | None) -> bool:
    """Returns whether the backward is faster with a window that hides nothing.

    Without causal and window the kernel takes tiles of 80 queries at these widths, and of 64 otherwise. A score
    function has too few registers in the large ones: on 2 H200s a softcapped row took 17.4 ms in shards that are whole
    rectangles, and 8.4 ms in shards whose parts are all causal.
    """
    plain = left is None and right is None and not masked.by_blocks(spec)
    return plain and spec.softcap is not None and 96 < max(spec.head_dim, spec.value_dim) <= 128


def invariant_refusals(spec: AttentionSpec, device: str, name: str) -> list[str]:
    """Returns why a call with ``invariant`` has other bits in another batch, or is not known to have the same."""
    if spec.invariant is None:
        return []
    lacks = {
        "pages": spec.paged is not None,
        "key_ranges or functions": spec.key_ranges_shape is not None or has_functions(spec),
        f"device {device}": device != "sm90",  # the number of query stages depends on the longest document
    }
    return [f"invariant={spec.invariant!r} with {what}: {name} has none" for what in lacks if lacks[what]]


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    reasons = [] if device == "sm90" else [f"{device}: proven on sm90 only"]
    if spec.paged is not None:
        reasons.append("keys and values in pages: torch operations make tables safe before the kernel")
    return tuple(reasons)


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
