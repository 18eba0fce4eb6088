"""Converts the offsets of packed documents to arrays, and completes them so that every token has a document."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.call.kinds import is_number
from attn_core.call.options import Options
from attn_core.call.seq_info import SeqInfo, cover_tail, tail_of
from attn_core.call.tensors import Inputs
from jax_frontend.dispatch import plan


def attach_complete(info: SeqInfo, inputs: Inputs, options: Options, token_axis: int = -3) -> tuple[Inputs, Options]:
    """Returns the inputs and options with the offsets of a SeqInfo, completed so that every token has a document.

    Args:
        token_axis: the axis of q and k that counts tokens.
    """
    has_tokens = all(len(array.shape) >= -token_axis for array in (inputs.q, inputs.k))  # if not, build_spec raises
    full = _complete(info, (inputs.q.shape[token_axis], inputs.k.shape[token_axis])) if has_tokens else info
    queries = _to_array("q", full.cu_seqlens_q)
    keys = queries if full.cu_seqlens_k is full.cu_seqlens_q else _to_array("k", full.cu_seqlens_k)
    inputs = inputs._replace(cu_seqlens_q=queries, cu_seqlens_k=keys)
    return inputs, options._replace(max_len_q=full.max_len_q, max_len_k=full.max_len_k)


def _complete(info: SeqInfo, tokens: tuple[int, int]) -> SeqInfo:
    """Returns the SeqInfo with documents for the tokens after its last offsets; traced offsets may end anywhere."""
    both = (info.cu_seqlens_q, info.cu_seqlens_k)
    kinds = (np.ndarray, jax.Array, jax.ShapeDtypeStruct)
    fit = all(isinstance(o, kinds) and o.dtype == np.int32 and o.ndim == 1 for o in both)
    if not fit or both[0].shape != both[1].shape or both[0].shape in ((0,), (1,)):
        return info  # a later check raises an error that names the wrong argument
    longest = (info.max_len_q, info.max_len_k)
    if not all(map(is_number, (*tokens, *both[0].shape))):
        # With symbolic sizes: one document for the other queries, one for the other keys. Either may be longer than
        # the maximum lengths say; backends that run symbolic calls do not use the maximum lengths.
        queries, keys = _append(both, ((tokens[0], tokens[0]), (0, tokens[1])))
        return SeqInfo.unchecked(queries, keys, *longest)
    if all(plan.is_on_host(offsets) for offsets in both):
        queries, keys = (np.asarray(offsets) for offsets in both)
        full = cover_tail(SeqInfo.unchecked(queries, keys, *longest), tokens)
        return info if full.cu_seqlens_q is queries else full
    # Traced offsets have no values, so documents for trailing tokens are always appended. They are empty if unneeded.
    tail = tail_of(tokens, longest, len(both[0]) - 1)
    if tail is None:
        return info
    queries, keys = _append(both, (tuple(tail.ends_q.tolist()), tuple(tail.ends_k.tolist())))
    return SeqInfo.unchecked(queries, keys, tail.max_len_q, tail.max_len_k)


def _append(both: tuple[Any, Any], ends: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[Any, Any]:
    """Returns both sides' offsets followed by the ends; as types only, if one side is a ShapeDtypeStruct."""
    both = tuple(jax.device_put(offsets) if isinstance(offsets, np.ndarray) else offsets for offsets in both)
    if any(isinstance(offsets, jax.ShapeDtypeStruct) for offsets in both):
        return jax.eval_shape(partial(_concatenate, ends=ends), both)  # type: ignore[no-any-return]
    return _concatenate(both, ends=ends)  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames="ends", inline=True)
def _concatenate(
    both: tuple[jax.Array, jax.Array], ends: tuple[tuple[int, ...], tuple[int, ...]]
) -> tuple[jax.Array, ...]:
    """Concatenates in one jitted function, so that an eager call launches one program on the GPU, not several."""
    pairs = zip(both, (jnp.array(side, jnp.int32) for side in ends), strict=True)
    # The tail's ends assume the smallest last offset; the real one is known when the program runs.
    return tuple(jnp.concatenate((offsets, jnp.maximum(tail, offsets[-1]))) for offsets, tail in pairs)


def _to_array(side: str, offsets: Any) -> Any:
    """Returns one side's offsets as an array. Host arrays move explicitly, which ``jax.transfer_guard`` allows."""
    if isinstance(offsets, np.ndarray):
        return jax.device_put(offsets)
    if not isinstance(offsets, jax.ShapeDtypeStruct):
        plan.check_array(f"seq_info.cu_seqlens_{side}", offsets)
    return offsets
