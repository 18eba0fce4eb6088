"""What ``attn_mask`` says to each of Finetrainers' providers, as a mask of scores or of keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from attn_core.dropins.finetrainers import VARLEN, AttentionProvider, two_axes
from attn_core.errors import DTypeError, ShapeError
from jax_frontend.dispatch.plan import check_array

Array = jax.Array


def stated_mask(provider: AttentionProvider, query: Array, key: Array, mask: Any) -> Array | None:
    """The mask as an array; one of two axes that is of keys with four.

    Raises:
        DTypeError, ShapeError: for a mask that is none, or whose two axes cannot be told.
    """
    if mask is None:
        return None
    check_array("attn_mask", mask)
    if mask.dtype != jnp.bool_ and not jnp.issubdtype(mask.dtype, jnp.floating):
        raise DTypeError(
            f"attn_mask: expected bool (True = visible) or a float to be added, got {mask.dtype}; a 0/1 mask becomes "
            "bool by attn_mask != 0"
        )
    if mask.ndim == 2 and query.ndim == 4 and provider not in VARLEN:
        about = two_axes(provider, tuple(mask.shape), query.shape[0], query.shape[2], key.shape[2])
        return mask[:, None, None, :] if about == "keys" else mask
    return mask


def kept_keys(provider: AttentionProvider, key: Array, mask: Array) -> Array:
    """bool ``[batch, kv_len]``: the keys that a varlen provider's mask keeps.

    Raises:
        DTypeError, ShapeError: for a mask that is added, or that has more than one row of queries or heads.
    """
    batch, _, kv_len, _ = key.shape
    given, wanted = list(mask.shape), f"[batch, kv_len] = [{batch}, {kv_len}], or [batch, 1, 1, kv_len]"
    if mask.dtype != jnp.bool_:
        raise DTypeError(
            f"attn_mask: provider {provider.value} takes bool masks of keys {wanted}, got {mask.dtype} {given}; for a "
            "mask that is added use another provider"
        )
    keep = mask[None] if mask.ndim == 1 else mask
    if keep.ndim == 4 and keep.shape[1:3] == (1, 1):
        keep = keep[:, 0, 0]
    if keep.ndim != 2 or keep.shape[0] not in (1, batch) or keep.shape[1] not in (1, kv_len):
        raise ShapeError(
            f"attn_mask: provider {provider.value} takes masks of keys {wanted}, got {given}; for a mask that differs "
            "among queries or heads use another provider"
        )
    return jnp.broadcast_to(keep, (batch, kv_len))
