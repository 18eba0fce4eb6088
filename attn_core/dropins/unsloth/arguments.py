"""Unsloth's attention dispatch as data: its two argument objects, their sizes, and its names for backends.

The names and fields are Unsloth's (``unsloth/utils/attention_dispatch.py``). ``attn_core.dropins.unsloth.request``
interprets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from attn_core import backends
from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo, is_host_int
from attn_core.errors import ShapeError, SpecError, shown

FLASH_VARLEN = "flash_varlen"
FLASH_DENSE = "flash_dense"
XFORMERS = "xformers"
SDPA = "sdpa"

FAMILIES = {
    FLASH_VARLEN: ("flash3", "flash4", "flash2", "sdpa_flash"),
    FLASH_DENSE: ("flash3", "flash4", "flash2", "sdpa_flash"),
    XFORMERS: ("xformers",),
    SDPA: ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient"),
}
"""The preferred backends for each of the host's backend words; automatic choice follows if none supports the call."""


@dataclass
class AttentionConfig:
    """A layer's settings: a backend word, the grouping of heads, and keyword bags named after backends.

    Options in any bag apply on every backend. Two bags with different values for one option are an error. Dropout is
    the exception: the bag of the host's branch decides, and without the key there it is 0.
    """

    backend: str
    n_kv_heads: int
    n_groups: int
    flash_dense_kwargs: Mapping[str, Any] | None = None
    flash_varlen_kwargs: Mapping[str, Any] | None = None
    sdpa_kwargs: Mapping[str, Any] | None = None
    xformers_kwargs: Mapping[str, Any] | None = None


@dataclass
class AttentionContext:
    """One call: its sizes and its masks. ``sliding_window=W`` is W keys, self included; 0 or less is no window.

    Attributes:
        prefix_seg_info: the layout of groups of rows that share a prefix (see attn_core.dropins.unsloth.prefix).
        is_causal: False makes the call see every key; True leaves it to the config's keyword bags.
        training: whether the layer trains, which is also true in a checkpoint's first pass, without gradients.
    """

    bsz: int
    q_len: int
    kv_seq_len: int
    n_heads: int
    head_dim: int
    requires_grad: bool = False
    seq_info: Any = None
    attention_mask: Any = None
    causal_mask: Any = None
    sliding_window: int | None = None
    prefix_seg_info: Any = None
    is_causal: bool = True
    training: bool = False


def trains(context: AttentionContext) -> bool:
    """Returns whether the call's kernel must have a backward. Raises SpecError for a flag that is not a bool."""
    # Contexts of the host's releases before October 2026 have no ``training``.
    return check_flag("context.requires_grad", context.requires_grad) or check_flag(
        "context.training", getattr(context, "training", False)
    )


def is_bidirectional(context: AttentionContext) -> bool:
    """Returns whether ``is_causal`` is False. Raises SpecError if it is not a bool."""
    # Contexts of the host's releases before October 2026 have no ``is_causal``.
    return not check_flag("context.is_causal", getattr(context, "is_causal", True))


def preference(
    config: AttentionConfig, framework: str, device: str, invariant: str | None = None
) -> tuple[str, ...] | None:
    """Returns the backends to try: the family that the config names, then automatic choice.

    With a promise of equal bits it is None, automatic choice alone, which has one backend for all calls with a row.
    """
    return None if invariant is not None else _preference(config.backend, framework, backends.kind_of(device))


@lru_cache(maxsize=64)
def _preference(word: str, framework: str, kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*FAMILIES[word], *backends.usual_order(framework, kind))))


def check_sizes(config: AttentionConfig, context: AttentionContext, q: Any, k: Any, v: Any) -> None:
    """Raises ShapeError if the sizes in config and context differ from those of ``Q``, ``K``, ``V``.

    q, k, v are the shapes ``[bsz, heads, len, head_dim]``.
    """
    # The host never compares these sizes, and a wrong one would go unnoticed.
    keys = (context.bsz, config.n_kv_heads, context.kv_seq_len)
    stated = {
        "Q": (q, (context.bsz, context.n_heads, context.q_len, context.head_dim)),
        "K": (k, (*keys, context.head_dim)),
        "V": (v, (*keys, v[3] if len(v) == 4 else context.head_dim)),  # V may have other channels
    }
    for name, (shape, expected) in stated.items():
        if tuple(shape) != expected:
            raise ShapeError(f"{name}: expected {list(expected)} from config and context, got {list(shape)}")
    if config.n_groups * config.n_kv_heads != context.n_heads:
        raise ShapeError(
            f"config.n_groups={config.n_groups}: expected n_heads // n_kv_heads = "
            f"{context.n_heads} // {config.n_kv_heads}"
        )


_LATER = ("training", "is_causal")
"""Fields that contexts of the host's older releases lack."""

_SIZES = {"config": ("n_kv_heads", "n_groups"), "context": ("bsz", "q_len", "kv_seq_len", "n_heads", "head_dim")}


def check_fields(config: AttentionConfig, context: AttentionContext) -> None:
    """Raises SpecError for arguments without the fields of ours, or with sizes that are no numbers."""
    for name, given, kind in (("config", config, AttentionConfig), ("context", context, AttentionContext)):
        if type(given) is not kind:  # the host passes classes of its own
            needed = [field.name for field in fields(kind) if field.name not in _LATER]
            if missing := [field for field in needed if not hasattr(given, field)]:
                raise SpecError(
                    f"{name}: expected an object like {kind.__name__}, got {type(given).__name__} without {missing}"
                )
        for field in _SIZES[name]:
            if not is_host_int(getattr(given, field)):
                raise SpecError(f"{name}.{field}={shown(getattr(given, field))}: expected an int")


def documents(context: AttentionContext) -> SeqInfo | None:
    """Returns the documents of ``context.seq_info``. One list of lengths needs q_len == kv_seq_len, else SpecError."""
    info = SeqInfo.coerce(context.seq_info)
    # One list describes queries and keys alike. Beside a cache there are more keys, so it cannot fit both.
    if info is not None and info.cu_seqlens_q is info.cu_seqlens_k and context.q_len != context.kv_seq_len:
        raise SpecError(
            "seq_info: expected separate lengths for queries and keys, because "
            f"context.q_len={context.q_len} and context.kv_seq_len={context.kv_seq_len} differ, got one list for both; "
            "build one with SeqInfo.from_lengths(lengths_q, lengths_k)"
        )
    return info


def computed_in(*dtypes: str) -> str | None:
    """Returns the dtype that the host casts float32 tensors to if the others have one half dtype; None for no cast.

    Adapters such as DoRA make some of Q, K and V float32.
    """
    others = set(dtypes) - {"float32"}  # two different half dtypes are an error, which ``attention`` raises
    half = others.pop() if len(others) == 1 and "float32" in dtypes else None
    return half if half in ("bfloat16", "float16") else None


def choose_word(available: tuple[str, ...], use_varlen: bool, dropout: float = 0.0) -> str:
    """Returns the host's backend word for a machine with these backends: flash-attn, then xformers, then SDPA.

    Packed rows without dropout prefer SDPA to xformers if torch's own flash kernel is available, as in the host.
    """
    if any(name in available for name in ("flash2", "flash3", "flash4")):
        return FLASH_VARLEN if use_varlen else FLASH_DENSE
    if "xformers" not in available or (use_varlen and not dropout and "sdpa_flash" in available):
        return SDPA
    return XFORMERS
