"""What a call of Unsloth's ``run_attention`` means, as plain data.

The meaning is the same on every backend. The host's own branches differ from each other; docs/reference/semantics.md
lists our choices. Nothing here is a tensor operation: the frontends turn a ``Meaning`` into a call of ``attention``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.call.options import flag, normalise_window
from attn_core.call.seq_info import SeqInfo, is_host_int
from attn_core.dropins.keyword_bags import BAGS, Stated, bag_of, distances, state_mask, stated_in
from attn_core.dropins.unsloth.arguments import (
    FAMILIES,
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    AttentionConfig,
    AttentionContext,
)
from attn_core.dropins.unsloth.block_masks import Blocks, blocks
from attn_core.errors import ShapeError, SpecError


class Meaning(NamedTuple):
    """A call in this library's words.

    mask is what the host calls attention_mask, causal_mask, attn_mask or attn_bias, and mask_name where it was given.
    keep: it is the host's 2-D ``attention_mask``, ``[bsz, kv_len]`` of keys, non-zero keeps. Any other mask is complete
    by itself: ``[q_len, kv_len]``, ``[bsz, q_len, kv_len]`` or four axes. documents: those of an xformers mask.
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
    documents: SeqInfo | None


def interpret(config: AttentionConfig, context: AttentionContext) -> Meaning:
    """What a call means, whichever backend runs it.

    Without a mask the call is causal, bottom-right: new queries stand at the end of the keys. A 2-D ``attention_mask``
    keeps keys and is joined with that; any other mask is complete by itself, as the host builds them: causal is not
    added, unless a bag states it, and the sliding window is not. ``softcap=0`` and ``window_size=(-1, -1)`` are
    flash-attn's "none". A ``causal_mask`` that is True or False is no mask: it says whether the layer slides.

    Raises:
        SpecError: for keys nobody knows, bags that contradict each other, or an unknown backend word.
    """
    slides = context.causal_mask
    told = context.attention_mask is None and context.prefix_seg_info is None
    if told and (slides is None or slides is True or slides is False):
        try:
            kind, packed = type(context.sliding_window).__name__, context.seq_info is not None
            return _without_masks(config.backend, packed, slides, kind, context.sliding_window, _plain(config))
        except TypeError:  # something that cannot be a key: an array, say
            pass
    return _interpreted(config, context)


def _plain(config: AttentionConfig) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """The bags as a key; TypeError where one holds an array, which is equal to nothing but itself."""
    found = []
    for name in BAGS:
        bag = bag_of(config, name)
        if bag:
            if any(hasattr(value, "shape") for value in bag.values()):
                raise TypeError(name)
            found.append((name, tuple((key, _kind(value), value) for key, value in bag.items())))
    return tuple(found)


def _kind(value: Any) -> Any:
    """The type of an option, and of what stands in a tuple: 3.0 and 3 are equal keys, and so are pairs of them."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


@lru_cache(maxsize=1024)
def _without_masks(
    word: str, packed: bool, slides: bool | None, kind: str, sliding_window: int | None, bags: tuple[Any, ...]
) -> Meaning:
    """``_interpreted`` of a call that is nothing but plain values; ``kind`` keeps 1, 1.0 and True apart."""
    named = {name: {key: value for key, _, value in items} for name, items in bags}
    told: dict[str, Any] = {"seq_info": packed or None, "causal_mask": slides, "sliding_window": sliding_window}
    return _interpreted(AttentionConfig(word, 1, 1, **named), AttentionContext(1, 1, 1, 1, 1, **told))


def host_branch(config: AttentionConfig, context: AttentionContext) -> str:
    """The branch of the host that such a call lands in: its backend word, or where the host leads that word."""
    if context.prefix_seg_info is not None:
        return FLASH_VARLEN  # whose bag alone the host looks into there
    if context.attention_mask is not None:
        return SDPA
    return FLASH_DENSE if config.backend == FLASH_VARLEN and context.seq_info is None else config.backend


def _interpreted(config: AttentionConfig, context: AttentionContext) -> Meaning:
    if config.backend not in FAMILIES:
        raise SpecError(f"config.backend={config.backend!r}: expected one of {', '.join(FAMILIES)}")
    if context.sliding_window is not None and not is_host_int(context.sliding_window):
        raise SpecError(
            f"context.sliding_window={context.sliding_window!r}: expected how many keys a query sees, an int, or None"
        )
    stated = stated_in(config, host_branch(config, context))
    for name in ("attention_mask", "causal_mask"):
        value = getattr(context, name)
        if value is not None and not (name == "causal_mask" and isinstance(value, bool)):
            state_mask(stated, value, f"context.{name}")
    mask = stated["mask"].value
    keep = mask is not None and mask is context.attention_mask and len(getattr(mask, "shape", ())) == 2
    complete = mask is not None and not keep
    if stated["triangle"].where and stated["causal"].value is not None and not stated["causal"].value:
        stated["causal"].state(True, f"{stated['triangle'].where} is {stated['triangle'].value.__name__}, causal")
    found = None
    if stated["blocks"].where:
        found = blocks(stated["blocks"].value, stated["blocks"].where, context)
        name = type(stated["blocks"].value).__name__
        stated["causal"].state(found.causal, f"{stated['blocks'].where} is {name}, causal")
    causal = not complete if stated["causal"].value is None else _flag(stated["causal"])
    return Meaning(
        causal=causal,
        # The host's sliding window is in a complete mask; a bag's own distances still count.
        window=normalise_window(distances(stated["window"]), causal)
        if complete
        else _window(stated["window"], config, _with_window(context, found), causal),
        softcap=stated["softcap"].value or None,
        scale=stated["scale"].value,
        dropout=stated["dropout"].value or 0.0,
        deterministic=stated["deterministic"].value is not None and _flag(stated["deterministic"]),
        alibi_slopes=stated["alibi_slopes"].value,
        mask=mask,
        mask_name=stated["mask"].where,
        keep=keep,
        documents=None if found is None else found.documents,
    )


def _with_window(context: AttentionContext, found: Blocks | None) -> AttentionContext:
    """The context with the window of an xformers mask, which says itself that the layer slides."""
    if found is None or found.keys is None:
        return context
    keys = context.sliding_window
    if keys is not None and keys > 0 and keys != found.keys:
        raise SpecError(f"context.sliding_window={keys} contradicts the mask of xformers, whose window is {found.keys}")
    return replace(context, sliding_window=found.keys, causal_mask=True)


def _flag(stated: Stated) -> bool:
    return flag(stated.where, stated.value)


def _window(
    stated: Stated, config: AttentionConfig, context: AttentionContext, causal: bool
) -> tuple[int | None, int | None]:
    """One window out of flash-attn's ``window_size`` distances and the host's ``sliding_window`` keys.

    ``causal_mask=False`` says that the layer has no sliding window. Without that word the host's flash branches go by
    their distances, and where those have no left bound, by no window; the other branches go by ``sliding_window``.
    """
    keys, slides = context.sliding_window, context.causal_mask
    pair = distances(stated)
    unbounded = stated.where and (pair is None or pair[0] is None)
    in_flash = host_branch(config, context) in (FLASH_DENSE, FLASH_VARLEN)
    if keys is None or keys <= 0 or slides is False or (slides is not True and unbounded and in_flash):
        return normalise_window(pair, causal)
    if not causal:
        raise SpecError(
            f"context.sliding_window={keys}: expected a causal call, for it means that many keys up to and "
            "including self; without causal state window_size=(left, right) alone"
        )
    # The host's callers write window_size=(W, W) beside sliding_window=W, meaning W keys: (W - 1, 0).
    if not unbounded and pair is not None and pair[0] not in (keys - 1, keys):
        raise SpecError(
            f"{stated.where}={stated.value} contradicts context.sliding_window={keys}, which is {keys} keys, "
            f"self included: window_size=({keys - 1}, 0)"
        )
    return (keys - 1, 0)


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
