"""Reads masks of splash attention, JAX's own or tokamax's, that a caller passes as ``mask=``."""

from __future__ import annotations

from typing import Any

import jax

from attn_core.call.splash_masks import SplashCall, SplashMeaning, is_splash_mask, read
from jax_frontend.dispatch import plan

Seen = tuple[Any, Any, Any, Any, Any]
"""causal, alignment, window, mask and key_ranges of a call."""


def as_options(seen: Seen, seq_info: Any, alibi_slopes: Any, q: Any, k: Any, *, as_one: bool = False) -> Seen:
    """Returns what is visible, with options, key ranges or a mask in the place of a splash mask; else unchanged.

    Args:
        q, k: as ``attention`` takes them, with the sequence before the heads; or the one array of q, k and v.
        as_one: whether q and k are that array, ``[..., tokens, 3, heads, head_dim]``.
    """
    causal, alignment, window, mask, key_ranges = seen
    if not is_splash_mask(mask):
        return seen
    for name, array in (("q", q), ("k", k)):
        plan.check_array(name, array, shapes_only=True)
    axis = -4 if as_one else -3
    if len(q.shape) < -axis or len(k.shape) < -axis:  # the call's own checks name the array
        return causal, alignment, window, None, key_ranges
    lengths = q.shape[axis], k.shape[axis], q.shape[-2]
    call = SplashCall(causal, alignment, window, key_ranges, seq_info, alibi_slopes is not None, *lengths)
    meaning: SplashMeaning = read(mask, call)
    table = None if meaning.mask is None else jax.device_put(meaning.mask)  # explicitly, as transfer_guard allows
    return meaning.causal, meaning.alignment, meaning.window, table, meaning.key_ranges
