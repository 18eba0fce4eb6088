"""Unsloth's attention dispatch, as data: its two argument objects, and what a call with them means.

The names and fields are Unsloth's (``unsloth/utils/attention_dispatch.py``); the meaning is the same on every backend,
where the host's own branches differ from each other (docs/semantics.md lists the choices). Nothing here is a tensor
operation: the frontends turn a ``Meaning`` into a call of ``attention``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.errors import ShapeError, SpecError
from attn_core.options import flag, normalise_window
from attn_core.seq_info import is_host_int
from attn_core.unsloth_bags import BAGS, Stated, distances, state_mask, stated_in

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
"""Which backends each of the host's backend words prefers; what they cannot run goes to automatic choice."""


@dataclass
class AttentionConfig:
    """How a layer wants its attention: a backend word, the grouping of heads, and keyword bags named after backends.

    The bags count on whatever backend runs: an option is honoured wherever it is written, and two bags that say
    different things about one option are an error.
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
    """One call: its sizes and what is visible. ``sliding_window=W`` is W keys, self included; 0 or less is none."""

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


class Meaning(NamedTuple):
    """A call in this library's words.

    mask is what the host calls attention_mask, causal_mask, attn_mask or attn_bias, and mask_name where it was given.
    keep: it is the host's 2-D ``attention_mask``, ``[bsz, kv_len]`` of keys, non-zero keeps. Any other mask is complete
    by itself: ``[q_len, kv_len]``, ``[bsz, q_len, kv_len]`` or four axes.
    """

    causal: bool
    window: Any
    softcap: float | None
    scale: float | None
    dropout: float
    deterministic: bool
    alibi_slopes: Any
    mask: Any
    mask_name: str
    keep: bool


def interpret(config: AttentionConfig, context: AttentionContext) -> Meaning:
    """What a call means, whichever backend runs it.

    Without a mask the call is causal, bottom-right: new queries stand at the end of the keys. A 2-D ``attention_mask``
    keeps keys and is joined with that; any other mask is complete by itself, as the host builds them: causal and the
    sliding window are not added, unless a bag states causal. ``softcap=0`` and ``window_size=(-1, -1)`` are
    flash-attn's "none".

    Raises:
        SpecError: for keys nobody knows, bags that contradict each other, or an unknown backend word.
    """
    if context.attention_mask is None and context.causal_mask is None:
        try:
            kind = type(context.sliding_window).__name__
            return _without_masks(config.backend, kind, context.sliding_window, _plain(config))
        except TypeError:  # something that cannot be a key: an array, say
            pass
    return _interpreted(config, context)


def _plain(config: AttentionConfig) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The bags as a key; TypeError where one holds an array, which is equal to nothing but itself."""
    found = []
    for name in BAGS:
        bag = getattr(config, name)
        if bag:
            if any(hasattr(value, "shape") for value in bag.values()):
                raise TypeError(name)
            found.append((name, tuple((key, type(value), value) for key, value in bag.items())))
    return tuple(found)


@lru_cache(maxsize=1024)
def _without_masks(word: str, kind: str, sliding_window: int | None, bags: tuple[Any, ...]) -> Meaning:
    """``_interpreted`` of a call that is nothing but plain values; ``kind`` keeps 1, 1.0 and True apart."""
    named = {name: {key: value for key, _, value in items} for name, items in bags}
    return _interpreted(
        AttentionConfig(word, 1, 1, **named), AttentionContext(1, 1, 1, 1, 1, sliding_window=sliding_window)
    )


def _interpreted(config: AttentionConfig, context: AttentionContext) -> Meaning:
    if config.backend not in FAMILIES:
        raise SpecError(f"config.backend={config.backend!r}: expected one of {', '.join(FAMILIES)}")
    if context.sliding_window is not None and not is_host_int(context.sliding_window):
        raise SpecError(
            f"context.sliding_window={context.sliding_window!r}: expected how many keys a query sees, an int, or None"
        )
    stated = stated_in(config)
    for name in ("attention_mask", "causal_mask"):
        value = getattr(context, name)
        if value is not None:
            state_mask(stated, value, f"context.{name}")
    mask = stated["mask"].value
    keep = mask is not None and mask is context.attention_mask and len(getattr(mask, "shape", ())) == 2
    complete = mask is not None and not keep
    if stated["triangle"].where and stated["causal"].value is not None and not stated["causal"].value:
        stated["causal"].state(True, f"{stated['triangle'].where} is {stated['triangle'].value.__name__}, causal")
    causal = not complete if stated["causal"].value is None else _flag(stated["causal"])
    if complete and stated["causal"].value is None:
        window: Any = distances(stated["window"])  # the host's sliding window is in its mask; a bag's own still counts
    else:
        window = _window(stated["window"], context.sliding_window, causal)
    return Meaning(
        causal=causal,
        window=window,
        softcap=stated["softcap"].value or None,
        scale=stated["scale"].value,
        dropout=stated["dropout"].value or 0.0,
        deterministic=stated["deterministic"].value is not None and _flag(stated["deterministic"]),
        alibi_slopes=stated["alibi_slopes"].value,
        mask=mask,
        mask_name=stated["mask"].where,
        keep=keep,
    )


def check_mask(meaning: Meaning, context: AttentionContext) -> None:
    """Raises ShapeError for a mask whose axes cannot be told; ``attention`` checks the sizes of complete masks."""
    shape = list(meaning.mask.shape)
    if meaning.keep and shape != [context.bsz, context.kv_seq_len]:
        raise ShapeError(
            f"{meaning.mask_name}: expected the keys to keep, [bsz, kv_len] = [{context.bsz}, {context.kv_seq_len}], "
            f"got {shape}"
        )
    if len(shape) not in (2, 3, 4):
        raise ShapeError(f"{meaning.mask_name}: expected 2, 3 or 4 axes, got {shape}")


def preference(config: AttentionConfig, framework: str, device: str) -> tuple[str, ...]:
    """The backends to try: the family that the config names, then automatic choice."""
    return _preference(config.backend, framework, backends.kind_of(device))


@lru_cache(maxsize=64)
def _preference(word: str, framework: str, kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*FAMILIES[word], *backends.PREFERENCE.get((framework, kind), ()))))


def check_sizes(config: AttentionConfig, context: AttentionContext, q: Any, k: Any, v: Any) -> None:
    """Raises ShapeError where the sizes in config and context are not those of ``Q``, ``K``, ``V``.

    q, k, v are the shapes ``[bsz, heads, len, head_dim]``.
    """
    keys = (context.bsz, config.n_kv_heads, context.kv_seq_len)
    told = {
        "Q": (q, (context.bsz, context.n_heads, context.q_len, context.head_dim)),
        "K": (k, (*keys, context.head_dim)),
        "V": (v, (*keys, v[3] if len(v) == 4 else context.head_dim)),  # its channels are its own
    }
    for name, (shape, expected) in told.items():
        if tuple(shape) != expected:
            raise ShapeError(f"{name}: expected {list(expected)} from config and context, got {list(shape)}")
    if config.n_groups * config.n_kv_heads != context.n_heads:
        raise ShapeError(
            f"config.n_groups={config.n_groups}: expected n_heads // n_kv_heads = "
            f"{context.n_heads} // {config.n_kv_heads}"
        )


def _flag(stated: Stated) -> bool:
    return flag(stated.where, stated.value)


def choose_word(available: tuple[str, ...], use_varlen: bool) -> str:
    """The host's backend word for a machine with these backends: flash-attn, then xformers, then SDPA."""
    if any(name in available for name in ("flash2", "flash3", "flash4")):
        return FLASH_VARLEN if use_varlen else FLASH_DENSE
    return XFORMERS if "xformers" in available else SDPA


def _window(stated: Stated, sliding_window: int | None, causal: bool) -> tuple[int | None, int | None]:
    """One window out of flash-attn's ``window_size`` distances and the host's ``sliding_window`` keys."""
    keys = None if sliding_window is None or sliding_window <= 0 else sliding_window
    pair = distances(stated)
    if keys is None:
        return normalise_window(pair, causal)
    if not causal:
        raise SpecError(
            f"context.sliding_window={sliding_window}: expected a causal call, for it means that many keys up to and "
            "including self; without causal state window_size=(left, right) alone"
        )
    # The host's callers write window_size=(W, W) beside sliding_window=W, meaning W keys: (W - 1, 0).
    if pair is not None and pair[0] not in (keys - 1, keys):
        raise SpecError(
            f"{stated.where}={stated.value} contradicts context.sliding_window={sliding_window}, which is {keys} keys, "
            f"self included: window_size=({keys - 1}, 0)"
        )
    return (keys - 1, 0)
