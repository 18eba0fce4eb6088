"""Unsloth's attention dispatch (``unsloth/utils/attention_dispatch.py``) as plain data, and as a call of ``attention``.

The names and fields are Unsloth's. A call means the same on every backend. The host's own branches differ from each
other; docs/how_to/migrate/unsloth.md lists our choices. Arrays are torch tensors or JAX arrays: everything here uses
only what both have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from attn_core import backends, masks
from attn_core.backends.shared.caches import from_records
from attn_core.call.hints import MASKS, Meaning
from attn_core.call.kinds import check_kind, is_host_int
from attn_core.call.options import check_flag, normalise_window
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Array, dtype_name, mask_or_bias
from attn_core.dropins.flash_attn.arguments import FLASH_KERNELS, FLASH_PACKAGES, distances
from attn_core.errors import ShapeError, SpecError, shown

FLASH_VARLEN = "flash_varlen"
FLASH_DENSE = "flash_dense"
XFORMERS = "xformers"
SDPA = "sdpa"

FAMILIES = {
    FLASH_VARLEN: FLASH_KERNELS,
    FLASH_DENSE: FLASH_KERNELS,
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
        prefix_seg_info: the layout of groups of rows that share a prefix (see ``shared_prefixes``).
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


@from_records(maxsize=64)
def _preference(word: str, framework: str, kind: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*FAMILIES[word], *backends.usual_order(framework, kind))))


def check_sizes(
    config: AttentionConfig, context: AttentionContext, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> None:
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
"""The fields that must be ints."""


def check_fields(config: AttentionConfig, context: AttentionContext) -> None:
    """Raises SpecError for arguments that lack a field of our classes, or whose sizes are no ints."""
    for name, given, kind in (("config", config, AttentionConfig), ("context", context, AttentionContext)):
        if type(given) is not kind:  # the host passes classes of its own
            needed = [each.name for each in fields(kind) if each.name not in _LATER]
            if missing := [each for each in needed if not hasattr(given, each)]:
                raise SpecError(
                    f"{name}: expected an object like {kind.__name__}, got {type(given).__name__} without {missing}"
                )
        for size in _SIZES[name]:
            if not is_host_int(getattr(given, size)):
                raise SpecError(f"{name}.{size}={shown(getattr(given, size))}: expected an int")


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
    if any(name in available for name in FLASH_PACKAGES):
        return FLASH_VARLEN if use_varlen else FLASH_DENSE
    if not has_xformers(available) or (use_varlen and not dropout and "sdpa_flash" in available):
        return SDPA
    return XFORMERS


def has_xformers(available: tuple[str, ...]) -> bool:
    """Returns whether a machine with these backends runs the host's xformers branch on its own kernels."""
    return any(name in available for name in FAMILIES[XFORMERS])


_FLASH = {
    "causal": "causal",
    "softmax_scale": "scale",
    "dropout_p": "dropout",
    "window_size": "window",
    "softcap": "softcap",
    "alibi_slopes": "alibi_slopes",
    "deterministic": "deterministic",
    "invariant": "invariant",
}
OPTIONS = tuple(_FLASH.values())
"""Our names of the options that need no mask."""
BAGS: Mapping[str, Mapping[str, str | None]] = {
    "flash_dense_kwargs": _FLASH,
    "flash_varlen_kwargs": _FLASH,
    "sdpa_kwargs": {
        "is_causal": "causal",
        "scale": "scale",
        "dropout_p": "dropout",
        "attn_mask": "mask",
        "enable_gqa": None,  # follows from the shapes
        "invariant": "invariant",
    },
    "xformers_kwargs": {
        "scale": "scale",
        "p": "dropout",
        "attn_bias": "mask",
        "softcap": "softcap",
        "invariant": "invariant",
    },
}
"""By bag: the host's name of each option -> our name. ``invariant`` is ours alone."""


@dataclass
class Option:
    """One option of a call.

    Attributes:
        name: our name of it.
        value: its value, or None if no bag states it.
        where: the bag and key that state it, for errors; "" if none does.
    """

    name: str
    value: Any = None
    where: str = ""

    def state(self, value: object, where: str) -> None:
        """Sets the value. Raises SpecError if another place states another value."""
        # The host would take the value of one branch, so which one counts would depend on the machine.
        if self.where and not _same(self.value, value):
            raise SpecError(
                f"{where}={shown(value)} contradicts {self.where}={shown(self.value)}; "
                f"pass {self.name} once, or the same value twice"
            )
        self.value, self.where = value, where


def bag_of(config: object, name: str) -> Mapping[str, Any]:
    """Returns a bag of the config, empty if it is None. Raises SpecError if it is no mapping."""
    bag = getattr(config, name)
    if bag is None:
        return {}
    if type(bag) is not dict and not isinstance(bag, Mapping):
        raise SpecError(f"config.{name}={shown(bag)}: expected a dict of options by name, or None")
    return bag


def read_options(config: object, branch: str) -> dict[str, Option]:
    """Returns every option by our name, with its value if a bag of the config states one.

    Dropout counts in the bag of the host's branch alone, where a missing one is 0: hosts drop weights in some branches
    only.

    Raises:
        SpecError: for unknown keys, and bags that contradict each other.
    """
    stated = {name: Option(name) for name in (*OPTIONS, "mask", "triangle", "blocks")}
    for bag, spellings in BAGS.items():
        for key, value in bag_of(config, bag).items():
            # An option that is unknown here might change the result in the host, so it is not ignored.
            if key not in spellings:
                raise SpecError(f"config.{bag}[{key!r}]: unknown; expected one of {', '.join(spellings)}")
            option = spellings[key]
            if option == "dropout" and bag != f"{branch}_kwargs":
                continue  # the host's branch would not read this bag
            if option == "mask" and value is not None:
                state_mask(stated, value, f"config.{bag}[{key!r}]")
            elif option is not None and value is not None:
                stated[option].state(value, f"config.{bag}[{key!r}]")
    return stated


def state_mask(stated: dict[str, Option], value: object, where: str) -> None:
    """Records a mask under "mask"; xformers' under "blocks", or its type under "triangle" if it means causal alone."""
    meaning: Any = MASKS.get(type(value).__name__)
    if not isinstance(meaning, Meaning) or meaning.bias or not (meaning.causal or meaning.documents):
        stated["mask"].state(value, where)
    elif meaning.documents or meaning.window:
        stated["blocks"].state(value, where)
    else:  # the type, because two objects of these classes mean the same but need not be equal
        stated["triangle"].state(type(value), where)


def _same(one: object, other: object) -> bool:
    if one is other:
        return True
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return False  # comparing the values of arrays would wait for the device
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return list(one) == list(other)
    return bool(one == other)


class BlockMask(NamedTuple):
    """A mask in our terms. keys: the number of keys that a query sees, including its own; None for all."""

    causal: bool
    keys: int | None
    documents: SeqInfo | None


def read_block_mask(mask: object, where: str, context: AttentionContext) -> BlockMask:
    """Reads documents, causal and window from one of xformers' masks, by class name and attributes.

    Blocks that are just the rows of the batch define no documents: Unsloth's Mistral passes its window that way.

    Raises:
        SpecError: if both the mask and ``context.seq_info`` define documents, or if the diagonal is top-left and the
            documents have different numbers of queries and keys.
    """
    name = type(mask).__name__
    meaning: Any = MASKS[name]
    top_left = meaning.alignment == "top_left"
    documents = _blocks(mask, f"{where} is {name}", top_left, context) if meaning.documents else None
    return BlockMask(meaning.causal, getattr(mask, "_window_size", None), documents)


def _blocks(mask: Any, shown: str, top_left: bool, context: AttentionContext) -> SeqInfo | None:
    """Returns the documents of a block-diagonal mask of xFormers; None if its blocks are the rows of the batch."""
    sides = (mask.q_seqinfo, mask.k_seqinfo)
    starts, key_starts = (list(side.seqstart_py) for side in sides)
    lengths = context.q_len, context.kv_seq_len
    rows, key_rows = ([row * length for row in range(context.bsz + 1)] for length in lengths)
    # ``attention`` has one alignment for a call, and here it is bottom-right. Equal lengths make both agree.
    if top_left and starts != key_starts:
        raise SpecError(
            f"{shown}: expected as many keys as queries in each block; for new queries at the end of the keys use "
            f"{type(mask).__name__.removesuffix('Mask')}FromBottomRightMask"
        )
    if not starts:  # some callers fill in only the fields that kernels read
        info = SeqInfo(*(side.seqstart for side in sides), *(side.max_seqlen for side in sides))
    elif (starts, key_starts) == (rows, key_rows):
        if context.seq_info is None or context.bsz == 1:
            return None
        info = None  # the blocks are rows, but seq_info has documents in them: a contradiction
    else:
        info = SeqInfo.from_lengths(np.diff(starts).tolist(), np.diff(key_starts).tolist())
    if context.seq_info is not None:
        raise SpecError(
            f"{shown}: expected one block for the whole row, because context.seq_info already has the documents"
        )
    return info


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


def _kind(value: object) -> Any:
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
    """Reads config and context, in which several fields may say the same thing. A contradiction raises SpecError."""
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
    return mask_or_bias(request.mask_name, mask[:, None] if mask.ndim == 3 else mask)


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


PREFIX = "context.prefix_seg_info"


def resolve_prefix_seg_info(kwargs: Mapping[str, Any], past_key_value: object, attention_mask: object) -> Any:
    """Returns ``kwargs["prefix_seg_info"]``, or None.

    Raises:
        SpecError: if a cache or a mask comes with it, because neither supports shared prefixes.
    """
    check_kind("kwargs", kwargs, Mapping, "a dict of keywords")
    info = kwargs.get("prefix_seg_info")
    beside = {"past_key_value": past_key_value, "attention_mask": attention_mask}
    for name, value in beside.items():
        if info is not None and value is not None:
            raise SpecError(f"{name}: expected None with prefix_seg_info, got {type(value).__name__}")
    return info


def shared_prefixes(request: UnslothRequest, context: AttentionContext) -> np.ndarray:
    """Returns rows that share a prefix (Unsloth's GRPO) as key ranges of the rows laid end to end, cached by signature.

    A row consists of groups: one prefix, then the suffixes that continue it. A token of the prefix sees the prefix up
    to itself. A token of a suffix sees the whole prefix of its group, and its own suffix up to itself.
    ``context.prefix_seg_info`` has labels of every token: ``group_of_kv``, ``is_prefix`` and ``suffix_of_kv`` (padded
    at the end), with a ``signature`` that two layouts share only if they are equal.

    Raises:
        SpecError, ShapeError: for options that shared prefixes do not support, and for invalid labels.
    """
    _refuse_beside_prefixes(request, context)
    info = context.prefix_seg_info
    layout = _Layout(getattr(info, "signature", None), context.bsz * context.q_len, info)
    # Without a signature two different layouts would share a key, so nothing is cached.
    key_ranges, longest = (_read_layout if layout.has_key else _read_layout.__wrapped__)(layout)
    left = request.options["window"][0]
    # A window would count the tokens of other suffixes, so it is allowed only if it hides nothing.
    if left is not None and left + 1 < longest:
        raise SpecError(
            f"window of {left + 1} keys: expected {longest} or more with {PREFIX}, because its longest prefix "
            "and suffix have that many tokens together; or pass no window"
        )
    return key_ranges


def _refuse_beside_prefixes(request: UnslothRequest, context: AttentionContext) -> None:
    """Raises SpecError or ShapeError for options that shared prefixes do not support."""
    stated = (
        ("context.seq_info", context.seq_info),
        (request.mask_name, request.mask),
        ("blocks of an xformers mask", request.documents),
        ("alibi_slopes", request.options["alibi_slopes"]),
    )
    for name, value in stated:
        if value is not None:
            raise SpecError(f"{name}: expected None with {PREFIX}, got {type(value).__name__}")
    if dropout := request.options["dropout"]:
        raise SpecError(f"dropout_p={dropout}: expected 0 with {PREFIX}, because kernels compute each row in parts")
    if not request.options["causal"]:
        raise SpecError(f"causal=False: expected True with {PREFIX}, because its prefixes and suffixes are causal")
    if context.kv_seq_len != context.q_len:
        raise ShapeError(
            f"context.kv_seq_len={context.kv_seq_len}: expected q_len={context.q_len} with {PREFIX}, which has no cache"
        )


@dataclass(frozen=True)
class _Layout:
    """The key of the cache (a signature and the number of tokens), with the labels, which are not compared."""

    signature: Any
    tokens: int
    info: Any = field(compare=False)

    @property
    def has_key(self) -> bool:
        try:
            hash(self.signature)
        except TypeError:
            return False
        return self.signature is not None


@lru_cache(maxsize=16)
def _read_layout(layout: _Layout) -> tuple[np.ndarray, int]:
    """Reads the labels of a layout: its key ranges, and the most positions of a prefix with its longest suffix.

    Raises:
        ShapeError, SpecError: for invalid labels.
    """
    info, tokens = layout.info, layout.tokens
    labels = []
    for name in ("group_of_kv", "is_prefix", "suffix_of_kv"):
        # The labels may be padded at the end: only the labels of the call's tokens count.
        values = getattr(info, name)
        values = np.asarray(values.cpu() if hasattr(values, "cpu") else values)  # a tensor on a GPU is waited for
        if values.ndim != 1 or len(values) < tokens:
            raise ShapeError(f"{PREFIX}.{name}: expected a label for each of {tokens} tokens, got {list(values.shape)}")
        labels.append(values[:tokens].tolist())
    if getattr(info, "T", tokens) != tokens:
        raise ShapeError(f"{PREFIX}.T={info.T}: expected the {tokens} tokens of Q")
    runs: dict[Any, list[tuple[Any, int]]] = {}  # by group: (None or the suffix, number of tokens), in order
    places = ((group, None if prefix else suffix) for group, prefix, suffix in zip(*labels, strict=True))
    last = object()
    for (group, suffix), members in groupby(places):
        seen = runs.setdefault(group, [])
        again = suffix in (name for name, _ in seen)
        if (seen and group != last) or again or (seen and suffix is None):
            raise SpecError(
                f"{PREFIX}: expected the tokens of each group next to each other, its prefix first and each suffix in "
                f"one piece, but group {group} differs"
            )
        seen.append((suffix, sum(1 for _ in members)))
        last = group
    prefixes, suffixes = [], []
    for group_runs in runs.values():
        prefixes.append(group_runs[0][1] if group_runs[0][0] is None else 0)
        suffixes.append([length for name, length in group_runs if name is not None])
    longest = max((prefix + max(rest, default=0) for prefix, rest in zip(prefixes, suffixes)), default=0)
    return masks.shared_prefix(prefixes, suffixes), longest


class HostCall(NamedTuple):
    """The call in our terms.

    Attributes:
        options: the keywords of ``attention`` besides ``backend``.
        preferred: the backends to try, or None for automatic choice.
        joined: the axes in place of ``[bsz, len]`` if the rows are laid end to end, else None.
        axes: of the result, ``[bsz, q_len, n_heads, value_dim]``.
    """

    options: dict[str, Any]
    preferred: tuple[str, ...] | None
    joined: tuple[int, ...] | None
    axes: tuple[int, ...]

    def rows(self, *arrays: Any) -> list[Any]:
        """Returns arrays ``[bsz, heads, len, dim]`` as ``attention`` takes them."""
        rows = [array.swapaxes(1, 2) for array in arrays]  # [bsz, len, heads, dim]
        return rows if self.joined is None else [array.reshape(*self.joined, *array.shape[2:]) for array in rows]

    def split(self, out: Any) -> Any:
        """Returns the output of ``attention`` in the axes of the result."""
        return out if self.joined is None else out.reshape(self.axes)


def prepare(
    framework: str,
    device: str,
    check: Callable[[str, Any], object],
    config: AttentionConfig,
    context: AttentionContext,
    operands: tuple[Array, Array, Array],
) -> HostCall:
    """Returns the call of Q, K and V, ``[bsz, heads, len, dim]``.

    Args:
        check: raises an error that names an argument unless its value is an array of the framework.
    """
    check_fields(config, context)
    check_sizes(config, context, *(array.shape for array in operands))
    request = interpret(config, context)
    preferred = preference(config, framework, device, request.options["invariant"])
    axes = (context.bsz, context.q_len, context.n_heads, operands[2].shape[3])
    if context.prefix_seg_info is not None:
        # The ranges say what is visible, and every other option but these is refused.
        options = {name: request.options[name] for name in ("softcap", "scale", "deterministic", "invariant")}
        return HostCall({**options, "key_ranges": shared_prefixes(request, context)}, preferred, (1, -1), axes)
    if request.mask is not None:
        check(request.mask_name, request.mask)
    mask, bias = split_mask(request, context)
    info = request.documents or documents(context)
    options = {**request.options, "mask": mask, "bias": bias, "seq_info": info}
    return HostCall(options, preferred, None if info is None else (-1,), axes)
