"""Interprets a call of Unsloth's ``run_attention`` as plain data.

A call means the same on every backend. The host's own branches differ from each other; docs/how_to/migrate/unsloth.md
lists our choices. This file has no tensor operations: the frontends turn an ``UnslothRequest`` into a call of
``attention``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.call.options import check_flag, normalise_window
from attn_core.call.seq_info import SeqInfo, is_host_int
from attn_core.call.tensors import dtype_name
from attn_core.dropins.keyword_bags import BAGS, OPTIONS, Option, bag_of, distances, read_options, state_mask
from attn_core.dropins.unsloth.arguments import (
    FAMILIES,
    FLASH_DENSE,
    FLASH_VARLEN,
    SDPA,
    AttentionConfig,
    AttentionContext,
    is_bidirectional,
)
from attn_core.dropins.unsloth.block_masks import BlockMask, read_block_mask
from attn_core.errors import DTypeError, ShapeError, SpecError, shown


class UnslothRequest(NamedTuple):
    """A call of Unsloth's ``run_attention`` as arguments of our ``attention``.

    Attributes:
        options: the keywords of ``attention`` that need no mask, those of ``OPTIONS``.
        mask: the host's attention_mask, causal_mask, attn_mask or attn_bias, or None.
        mask_name: the argument that the mask came from, for errors.
        keep: whether the mask is the host's 2-D ``attention_mask``, ``[bsz, kv_len]``, in which nonzero keys are
            visible. Any other mask is complete by itself: ``[q_len, kv_len]``, ``[bsz, q_len, kv_len]`` or four axes.
        documents: the documents of an xformers mask, or None.
    """

    options: dict[str, Any]
    mask: Any
    mask_name: str
    keep: bool
    documents: SeqInfo | None


def interpret(config: AttentionConfig, context: AttentionContext) -> UnslothRequest:
    """Interprets a call, independently of the backend.

    Without a mask the call is causal, bottom-right: new queries are at the end of the keys. A 2-D ``attention_mask``
    hides keys in addition. Any other mask is complete by itself, as the host builds them: causal is added only if a bag
    states it, and the sliding window never is. ``softcap=0`` and ``window_size=(-1, -1)`` are flash-attn's "none". A
    ``causal_mask`` that is True or False is no mask: it states whether the layer has a sliding window. The context's
    ``is_causal=False`` states causal like a bag does.

    Raises:
        SpecError: for unknown keys, bags that contradict each other, or an unknown backend word.
    """
    slides = context.causal_mask
    unmasked = context.attention_mask is None and context.prefix_seg_info is None
    if unmasked and (slides is None or slides is True or slides is False):
        try:
            kind, packed = type(context.sliding_window).__name__, context.seq_info is not None
            flags = (slides, is_bidirectional(context))
            return _without_masks(config.backend, packed, flags, kind, context.sliding_window, _plain(config))
        except TypeError:  # a value that cannot be part of a key, e.g. an array
            pass
    return _interpret(config, context)


def _plain(config: AttentionConfig) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Returns the bags as a cache key. Raises TypeError for an array, which cannot be compared."""
    items = []
    for name in BAGS:
        bag = bag_of(config, name)
        if bag:
            if any(hasattr(value, "shape") for value in bag.values()):
                raise TypeError(name)
            items.append((name, tuple((key, _kind(value), value) for key, value in bag.items())))
    return tuple(items)


def _kind(value: Any) -> Any:
    """Returns the type of an option, or of a tuple's items: 3.0 and 3 are equal as keys, and so are pairs of them."""
    return tuple(map(type, value)) if type(value) is tuple else type(value)


@lru_cache(maxsize=1024)
def _without_masks(
    word: str,
    packed: bool,
    flags: tuple[bool | None, bool],
    kind: str,
    sliding_window: int | None,
    bags: tuple[Any, ...],
) -> UnslothRequest:
    """Caches ``_interpret`` for calls of plain values. ``kind`` distinguishes 1, 1.0 and True.

    flags: whether the layer slides (``causal_mask``, or None), and whether the call is bidirectional.
    """
    named = {name: {key: value for key, _, value in items} for name, items in bags}
    fields: dict[str, Any] = {"seq_info": packed or None, "causal_mask": flags[0], "sliding_window": sliding_window}
    fields["is_causal"] = not flags[1]
    return _interpret(AttentionConfig(word, 1, 1, **named), AttentionContext(1, 1, 1, 1, 1, **fields))


def host_branch(config: AttentionConfig, context: AttentionContext) -> str:
    """Returns the branch that the host would take: its backend word, or the branch that it redirects the word to."""
    if context.prefix_seg_info is not None:
        return FLASH_VARLEN  # the only bag that the host reads in this case
    if context.attention_mask is not None:
        return SDPA
    return FLASH_DENSE if config.backend == FLASH_VARLEN and context.seq_info is None else config.backend


def _interpret(config: AttentionConfig, context: AttentionContext) -> UnslothRequest:
    if not isinstance(config.backend, str) or config.backend not in FAMILIES:
        raise SpecError(f"config.backend={shown(config.backend)}: expected one of {', '.join(FAMILIES)}")
    if context.sliding_window is not None and not is_host_int(context.sliding_window):
        raise SpecError(
            f"context.sliding_window={shown(context.sliding_window)}: expected the number of keys that a query sees, "
            "or None"
        )
    stated = read_options(config, host_branch(config, context))
    if is_bidirectional(context):  # True is the default, so it states nothing
        stated["causal"].state(False, "context.is_causal")
    # Masks in the context count like masks in a bag: two different ones contradict each other.
    for name in ("attention_mask", "causal_mask"):
        value = getattr(context, name)
        if value is not None and not (name == "causal_mask" and isinstance(value, bool)):
            state_mask(stated, value, f"context.{name}")
    mask = stated["mask"].value
    keep = mask is not None and mask is context.attention_mask and len(getattr(mask, "shape", ())) == 2
    complete = mask is not None and not keep
    if stated["triangle"].where and stated["causal"].value is not None and not stated["causal"].value:
        stated["causal"].state(True, f"{stated['triangle'].where} is {stated['triangle'].value.__name__}, causal")
    block_mask = None
    if stated["blocks"].where:
        block_mask = read_block_mask(stated["blocks"].value, stated["blocks"].where, context)
        name = type(stated["blocks"].value).__name__
        stated["causal"].state(block_mask.causal, f"{stated['blocks'].where} is {name}, causal")
    causal = not complete if stated["causal"].value is None else _flag(stated["causal"])
    if complete:  # the host's sliding window is in it; a bag's own distances still count
        window = normalise_window(distances(stated["window"].value, stated["window"].where), causal)
    else:
        window = _window(stated["window"], config, _with_window(context, block_mask), causal)
    options = {name: stated[name].value for name in OPTIONS} | {"causal": causal, "window": window}
    options["softcap"] = options["softcap"] or None
    options["dropout"] = options["dropout"] or 0.0
    options["deterministic"] = options["deterministic"] is not None and _flag(stated["deterministic"])
    documents = None if block_mask is None else block_mask.documents
    return UnslothRequest(options, mask, stated["mask"].where, keep, documents)


def _with_window(context: AttentionContext, block_mask: BlockMask | None) -> AttentionContext:
    """Returns the context with the window of an xformers mask, which implies that the layer slides."""
    if block_mask is None or block_mask.keys is None:
        return context
    keys = context.sliding_window
    if keys is not None and keys > 0 and keys != block_mask.keys:
        raise SpecError(
            f"context.sliding_window={keys} contradicts the mask of xformers, whose window is {block_mask.keys}"
        )
    return replace(context, sliding_window=block_mask.keys, causal_mask=True)


def _flag(stated: Option) -> bool:
    return check_flag(stated.where, stated.value)


def _window(
    stated: Option, config: AttentionConfig, context: AttentionContext, causal: bool
) -> tuple[int | None, int | None]:
    """Combines flash-attn's ``window_size`` distances and the host's ``sliding_window`` keys into one window.

    ``causal_mask=False`` means that the layer has no sliding window. Otherwise the host's flash branches follow their
    distances (no window if the left side is unbounded), and the other branches follow ``sliding_window``.
    """
    keys, slides = context.sliding_window, context.causal_mask
    pair = distances(stated.value, stated.where)
    unbounded = stated.where and (pair is None or pair[0] is None)
    in_flash = host_branch(config, context) in (FLASH_DENSE, FLASH_VARLEN)
    if keys is None or keys <= 0 or slides is False or (slides is not True and unbounded and in_flash):
        return normalise_window(pair, causal)
    if not causal:
        raise SpecError(
            f"context.sliding_window={keys}: expected a causal call, because the window ends at the query itself; "
            "without causal pass window_size=(left, right) instead"
        )
    # The host's callers pass window_size=(W, W) together with sliding_window=W and mean W keys: (W - 1, 0).
    if not unbounded and pair is not None and pair[0] not in (keys - 1, keys):
        raise SpecError(
            f"{stated.where}={stated.value} contradicts context.sliding_window={keys}, which is {keys} keys, "
            f"self included: window_size=({keys - 1}, 0)"
        )
    return (keys - 1, 0)


def split_mask(request: UnslothRequest, context: AttentionContext) -> tuple[Any, Any]:
    """Returns Unsloth's mask as (bool mask, additive bias) of four axes. See ``UnslothRequest.mask`` for its ranks.

    Raises:
        ShapeError, DTypeError: for a mask that is not a mask of keys, bool, or float.
    """
    mask = request.mask
    if mask is None:
        return None, None
    _check_mask(request, context)
    if request.keep:
        # JAX may refuse to compare a bool with a number (jax_numpy_dtype_promotion="strict").
        keys = mask if dtype_name(mask) == "bool" else mask != 0
        if context.seq_info is not None or request.documents is not None:  # rows are laid end to end, so their keys are
            keys = keys.reshape(1, -1)
        return keys[:, None, None, :], None
    table = mask[:, None] if mask.ndim == 3 else mask
    kind = dtype_name(table)
    if kind == "bool":
        return table, None
    if "float" in kind:
        return None, table
    raise DTypeError(
        f"{request.mask_name}: expected bool (True = visible) or a float to be added, got {table.dtype} of shape "
        f"{list(mask.shape)}; a 0/1 mask becomes bool by mask != 0"
    )


def _check_mask(request: UnslothRequest, context: AttentionContext) -> None:
    """Raises ShapeError for a mask with unsupported axes; ``attention`` checks the sizes of complete masks."""
    shape = list(request.mask.shape)
    if request.keep and shape != [context.bsz, context.kv_seq_len]:
        raise ShapeError(
            f"{request.mask_name}: expected a mask of keys, [bsz, kv_len] = [{context.bsz}, {context.kv_seq_len}], "
            f"got {shape}"
        )
    if len(shape) not in (2, 3, 4):
        raise ShapeError(f"{request.mask_name}: expected 2, 3 or 4 axes, got {shape}")
