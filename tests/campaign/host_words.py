"""Writes calls in the words of Unsloth, for the entries of both frameworks, and of Finetrainers, for torch's.

The words come from the hosts' own documentation and not from the drop-ins' code, so that a wrong drop-in is found. A
``draw`` (any integer) chooses among the ways in which a host can write one call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.masks import visible
from attn_core.call.spec import AttentionSpec
from tests.campaign.case import is_banded
from tests.campaign.entries import without

Arrays = dict[str, Any]


class Ops(NamedTuple):
    """Two operations of a framework: ``array`` of numpy's, and ``hide(bias, seen)``: -inf where ``seen`` is False."""

    array: Callable[[np.ndarray], Any]
    hide: Callable[[Any, Any], Any]


def is_aligned(spec: AttentionSpec, alignment: str) -> bool:
    """Returns whether the call is the same under an alignment."""
    counts = is_banded(spec) or spec.alibi_shape is not None
    return not counts or spec.alignment == alignment or (not spec.packed and spec.q_len == spec.kv_len)


def keys_seen(spec: AttentionSpec) -> int | None:
    """Returns W if each query sees the W keys that end at its own; None if it sees all keys before it.

    A call without causal may also end at the diagonal: by ``window=(left, 0)``.
    """
    return None if spec.window[0] is None else spec.window[0] + 1


def ends_at_diagonal(spec: AttentionSpec) -> bool:
    """Returns whether no query sees a key behind the diagonal."""
    return spec.causal or spec.window[1] == 0


def band_table(spec: AttentionSpec) -> np.ndarray:
    """Returns what causal and window leave visible, bool ``[1, 1, q_len, kv_len]``."""
    return visible(replace(spec, mask_shape=None))


def one_table(spec: AttentionSpec, arrays: Arrays, ops: Ops, with_band: bool) -> Any:
    """Returns mask and bias as the one table that a host takes: None, bool, or float with -inf for hidden pairs."""
    seen, bias = arrays["mask"], arrays["bias"]
    if with_band:
        band = ops.array(band_table(spec))
        seen = band if seen is None else band & seen
    if bias is None:
        return seen
    return bias if seen is None else ops.hide(bias, seen)


def is_of_keys(spec: AttentionSpec) -> bool:
    """Returns whether the mask only hides keys of whole rows, as padding does."""
    return spec.mask_shape is not None and spec.mask_shape[1:3] == (1, 1) and spec.bias_shape is None


def key_mask(spec: AttentionSpec, arrays: Arrays, ops: Ops) -> Any:
    """Returns such a mask as hosts write it, bool ``[batch, kv_len]``."""
    return ops.array(np.ones((spec.batch, spec.kv_len), bool)) & arrays["mask"][:, 0, 0]


def heads_first(array: Any) -> Any:
    """Returns ``[batch, heads, len, dim]`` of q, k or v; packed rows get a batch of 1."""
    return (array[None] if array.ndim == 3 else array).swapaxes(1, 2)


def window_size(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the window in flash-attn's words: inclusive distances, -1 for unbounded."""
    left, right = (-1 if distance is None else distance for distance in spec.window)
    return left, right


# Unsloth

WORDS = ("flash_varlen", "flash_dense", "xformers", "sdpa")
_lacks = without("sinks", "lse")


def unsloth_refuses(spec: AttentionSpec) -> str | None:
    """Returns why Unsloth cannot write a call, or None. Its diagonal ends at the last key."""
    needs = spec.packed or spec.alibi_shape is not None
    if needs and not is_aligned(spec, "bottom_right"):
        return "bottom-right alone"
    return _lacks(spec)


def unsloth_call(spec: AttentionSpec, arrays: Arrays, documents: Any, draw: int, ops: Ops) -> dict[str, Any]:
    """Returns a call of Unsloth's ``run_attention``: Q, K, V, and the fields of its config and its context.

    Args:
        documents: the packed documents as the host writes them, or None.
        draw: chooses a backend word, the bags that state the options, and the argument that has the mask.
    """
    masked = arrays["mask"] is not None or arrays["bias"] is not None
    of_keys = is_of_keys(spec)
    complete = masked and not of_keys
    moved = not is_aligned(spec, "bottom_right") or (complete and bool(draw & 1))
    merged = not spec.packed and is_banded(spec) and moved
    flash: dict[str, Any] = {"softmax_scale": spec.scale, "deterministic": spec.deterministic}
    flash |= {"softcap": spec.softcap or 0.0, "alibi_slopes": arrays["alibi_slopes"]}
    sdpa, xformers, context = {"scale": spec.scale}, {"scale": spec.scale}, {"seq_info": documents}
    if spec.dropout:
        flash["dropout_p"] = sdpa["dropout_p"] = xformers["p"] = spec.dropout
    if merged or complete:
        table = one_table(spec, arrays, ops, with_band=merged)
        if draw & 2:
            sdpa["attn_mask"] = table
        else:
            context["causal_mask" if draw & 4 else "attention_mask"] = table
    elif of_keys:
        keys = key_mask(spec, arrays, ops)
        context["attention_mask"] = keys * 1 if draw & 2 else keys
    if not merged:
        _say_band(spec, complete, draw, flash, context)
    config = {"backend": WORDS[draw // 8 % 4], "n_kv_heads": spec.num_kv_heads, "n_groups": spec.group_size}
    config |= {"flash_dense_kwargs" if draw & 32 else "flash_varlen_kwargs": flash}
    config |= {"sdpa_kwargs": sdpa, "xformers_kwargs": xformers}
    if spec.dropout:  # the bag of the host's branch decides, so every branch must state it
        config["flash_varlen_kwargs" if draw & 32 else "flash_dense_kwargs"] = {"dropout_p": spec.dropout}
    context |= {"bsz": spec.batch, "q_len": spec.q_len, "kv_seq_len": spec.kv_len, "n_heads": spec.num_heads}
    context |= {"head_dim": spec.head_dim, "requires_grad": spec.needs_backward, "training": spec.needs_backward}
    return {"config": config, "context": context} | {name.upper(): heads_first(arrays[name]) for name in "qkv"}


def _say_band(spec: AttentionSpec, complete: bool, draw: int, flash: dict[str, Any], context: dict[str, Any]) -> None:
    """States causal and window beside a mask that does not have them. Calls without a complete mask are causal."""
    slides = spec.causal and spec.window[0] is not None and not complete
    if spec.causal and (complete or draw & 64):
        flash["causal"] = True
    elif not spec.causal and not complete:
        if draw & 64:
            flash["causal"] = False
        else:
            context["is_causal"] = False
    if slides and draw & 128:
        context["sliding_window"] = keys = keys_seen(spec)
        if draw & 256:  # as Unsloth's Mistral and Gemma write W keys
            flash["window_size"] = (keys, keys)
    elif spec.window != (None, None):
        flash["window_size"] = window_size(spec)


# Finetrainers

PROVIDERS = {
    "math": ("_native_math",),
    "sdpa_flash": ("_native_flash", "flash", "flash_varlen"),
    "sdpa_efficient": ("_native_efficient",),
    "sdpa_cudnn": ("_native_cudnn",),
    "flex": ("flex",),
}
"""The host's words that lead to a backend."""


def finetrainers_refuses(spec: AttentionSpec) -> str | None:
    """Returns why Finetrainers cannot write a call, or None.

    ``is_causal`` puts the diagonal at the first key; flash-attn's distances and slopes count from the last.
    """
    if spec.packed:
        return "no packed documents"
    if spec.alibi_shape is not None and not is_aligned(spec, "bottom_right"):
        return "bottom-right alone"
    return without("sinks")(spec)


def finetrainers_call(
    spec: AttentionSpec, arrays: Arrays, backend: str | None, draw: int, ops: Ops
) -> tuple[str, dict[str, Any]]:
    """Returns a provider's word, and the arguments of ``attention_dispatch``."""
    words = PROVIDERS.get(backend or "", ("native",))
    word = words[draw % len(words)]
    by_keys = is_of_keys(spec) and word == "flash_varlen" and spec.window == (None, None) and spec.alibi_shape is None
    if word == "flash_varlen" and spec.mask_shape is not None and not (by_keys and _says_causal(spec)):
        word, by_keys = "flash", False  # flash_varlen takes masks of keys alone
    if word == "flash_varlen" and spec.bias_shape is not None:
        word = "flash"
    masked = arrays["mask"] is not None or arrays["bias"] is not None
    if spec.causal:  # torch's own function takes is_causal or a mask
        merged = not _says_causal(spec) or (masked and not by_keys)
    else:
        merged = spec.window != (None, None) and not is_aligned(spec, "bottom_right")
    if merged and word == "flash_varlen":
        word = "flash"
    kwargs: dict[str, Any] = {}
    if spec.softcap is not None:
        kwargs["softcap"] = spec.softcap
    if spec.window != (None, None) and not merged:
        kwargs["window_size"] = window_size(spec)
    if arrays["alibi_slopes"] is not None:
        kwargs["alibi_slopes"] = arrays["alibi_slopes"]
    kwargs |= {name: True for name in ("deterministic", "return_lse") if getattr(spec, name)}
    call: dict[str, Any] = {"query": heads_first(arrays["q"]), "key": heads_first(arrays["k"])}
    call |= {"value": heads_first(arrays["v"]), "is_causal": spec.causal and not merged, "scale": spec.scale}
    call["attn_mask"] = key_mask(spec, arrays, ops) if by_keys else one_table(spec, arrays, ops, with_band=merged)
    call |= {"enable_gqa": spec.group_size > 1 or bool(draw & 1), "dropout_p": spec.dropout}
    return word, call | ({"attention_kwargs": kwargs} if kwargs else {})


def _says_causal(spec: AttentionSpec) -> bool:
    """Returns whether ``is_causal`` and the distances beside it mean what the spec does."""
    apart = spec.window != (None, None) or spec.alibi_shape is not None
    return is_aligned(spec, "top_left") and (spec.q_len == spec.kv_len or not apart)
