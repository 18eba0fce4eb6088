"""The offsets of packed documents as arrays, with a document for every token; checked where they are on the host."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core import trailing_tokens
from attn_core.backends import Inputs
from attn_core.options import Options
from attn_core.seq_info import SeqInfo, check_cu_seqlens
from attn_core.spec import AttentionSpec
from jax_frontend import plan


def of(info: SeqInfo, inputs: Inputs, options: Options, token_axis: int = -3) -> tuple[Inputs, Options]:
    """Inputs and options with the offsets of a SeqInfo and a document for every token.

    Args:
        token_axis: which axis of q and k holds the tokens.
    """
    rows = all(len(array.shape) >= -token_axis for array in (inputs.q, inputs.k))  # else the call is refused for that
    made = _completed(info, (inputs.q.shape[token_axis], inputs.k.shape[token_axis])) if rows else info
    inputs = inputs._replace(cu_seqlens_q=_array(made, "q"), cu_seqlens_k=_array(made, "k"))
    return inputs, options._replace(max_len_q=made.max_len_q, max_len_k=made.max_len_k)


def _completed(info: SeqInfo, tokens: tuple[int, int]) -> SeqInfo:
    """The SeqInfo with documents for tokens behind its last offsets; traced ones may end anywhere."""
    both = (info.cu_seqlens_q, info.cu_seqlens_k)
    kinds = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)
    fit = all(isinstance(o, kinds) and o.dtype == np.int32 and o.ndim == 1 and o.size > 1 for o in both)
    if not fit or both[0].shape != both[1].shape:
        return info  # what is wrong is refused by name
    longest = (info.max_len_q, info.max_len_k)
    if all(_on_host(offsets) for offsets in both):
        queries, keys = (np.asarray(offsets) for offsets in both)
        made = trailing_tokens.completed(SeqInfo.unchecked(queries, keys, *longest), tokens)
        return info if made.cu_seqlens_q is queries else made
    tail = trailing_tokens.tail_of(tokens, longest, len(both[0]) - 1)
    if tail is None:
        return info
    queries, keys = (_followed(*each) for each in zip(both, (tail.ends_q, tail.ends_k), strict=True))
    return SeqInfo.unchecked(queries, keys, tail.max_len_q, tail.max_len_k)


def _followed(offsets: Any, ends: np.ndarray) -> Any:
    if isinstance(offsets, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((len(offsets) + len(ends),), offsets.dtype)
    offsets, ends = (jax.device_put(part) for part in (offsets, ends))
    return jnp.concatenate((offsets, jnp.maximum(ends, offsets[-1])))


def _array(info: SeqInfo, side: str) -> Any:
    """One side's offsets as an array. Host arrays are moved in words, so that ``jax.transfer_guard`` lets them pass."""
    offsets = getattr(info, f"cu_seqlens_{side}")
    if isinstance(offsets, np.ndarray):
        return jax.device_put(offsets)
    if not isinstance(offsets, jax.ShapeDtypeStruct):
        plan.check_array(f"seq_info.cu_seqlens_{side}", offsets)
    return offsets


def _on_host(offsets: Any) -> bool:
    concrete = isinstance(offsets, jax.Array) and not isinstance(offsets, jax.core.Tracer)
    return isinstance(offsets, np.ndarray) or (concrete and plan.device_name(offsets) == "cpu")


def check(spec: AttentionSpec, info: SeqInfo | None) -> None:
    """Checks the values of a packed call's offsets wherever they are on the host; traced ones have none yet."""
    if info is None:
        return
    checks = (
        ("q", info.cu_seqlens_q, spec.q_len, info.max_len_q),
        ("k", info.cu_seqlens_k, spec.kv_len, info.max_len_k),
    )
    for side, offsets, tokens, longest in checks:
        if _on_host(offsets):
            check_cu_seqlens(np.asarray(offsets), longest, side=side, tokens=tokens)
