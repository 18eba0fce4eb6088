"""What transformers' mask functions hand to attention: a description of what is visible, not a query-by-key table.

transformers writes a mask as a function of indices, built from a few named pieces. The pieces that are known here
become an attention call's own options (causal, window, documents, which keys are padding); any other function becomes
the dense mask that transformers itself would build from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import masking_utils  # here, for older compilers trace no import of a lazy module

from attn_core.errors import SpecError
from torch_frontend.context_parallel import use
from torch_frontend.huggingface import context as huggingface_context
from torch_frontend.huggingface.described import DescribedMask, Visible
from torch_frontend.huggingface.documents import numbered

Tensor = torch.Tensor


class Pattern(NamedTuple):
    """What a mask function says of a query at position i and a key at position j: ``-left <= j - i <= right``.

    None is unbounded. ``documents [batch, tokens]``, where given, numbers the documents of packed rows.
    """

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Any:
    """transformers' mask interface: a DescribedMask, or the dense bool mask of a function that no pattern describes.

    Outside compilation the values of ``attention_mask`` (and of a static cache's offset) are looked at once, here, for
    all layers: a batch without padding then needs no mask at all. What is described is what they are now, whatever a
    cache or the caller writes into them later.

    Returns:
        DescribedMask, or bool ``[batch, 1, q_length, kv_length]``.
    """
    if isinstance(attention_mask, DescribedMask):  # made ahead by generate, and shown to the model's mask function
        return attention_mask
    context = use.active()
    if context is not None:
        sizes = batch_size, (q_length, kv_length), (q_offset, kv_offset)
        return huggingface_context.mask(context, *sizes, read, mask_function, attention_mask, device)
    dense = partial(
        masking_utils.sdpa_mask,
        batch_size,
        q_length,
        kv_length,
        kv_offset=kv_offset,
        mask_function=mask_function,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=options.get("use_vmap", False),
        device=device,
    )
    compiling = torch.compiler.is_compiling()
    causal = "allow_is_bidirectional_skip" not in options
    steps = q_length == 1 and causal and not options.get("allow_is_causal_skip", True)  # decoding that may be compiled
    if steps or (compiling and isinstance(q_offset, Tensor)):
        # one row of keys is as short as a description, and its values may change without a recompile
        return dense(q_offset=q_offset, attention_mask=attention_mask)
    q_offset = int(q_offset)  # the cache moves a tensor in place
    pattern = promised(mask_function, options) if compiling else read(mask_function)
    offset = q_offset - kv_offset
    if pattern is None or not placeable(pattern, offset, q_length, kv_length):
        return dense(q_offset=q_offset, attention_mask=attention_mask)
    if attention_mask is not None:
        attention_mask = attention_mask.to(torch.bool, copy=True)  # the caller's may change before it is built
    keys = visible_keys(attention_mask, kv_length, kv_offset)
    if keys is not None and not compiling and bool(keys.all()):
        attention_mask = keys = None
    info = None if pattern.documents is None else numbered(pattern.documents)
    visible = Visible(pattern.left, pattern.right, offset, (q_length, kv_length), keys, info)
    return DescribedMask(batch_size, device, visible, partial(dense, q_offset=q_offset, attention_mask=attention_mask))


def placeable(pattern: Pattern, offset: int, q_length: int, kv_length: int) -> bool:
    """Whether a call's two alignments can say where the queries stand among the keys, once hidden keys are cut off."""
    if (pattern.left, pattern.right) == (None, None) or offset + q_length == kv_length:
        return True
    return offset == 0 if pattern.right != 0 else offset >= 0 and offset + q_length < kv_length


def visible_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """The bool mask ``[batch, seen tokens]`` for the keys at hand, ``[batch, kv_length]``; what it lacks is hidden.

    Raises:
        SpecError: for a mask of another rank, which nobody could apply.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise SpecError(
            f"attention_mask: expected [batch, tokens], or a complete mask of 4 axes, got shape "
            f"{list(attention_mask.shape)}"
        )
    missing = kv_length + kv_offset - attention_mask.shape[1]
    if missing > 0:
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def promised(function: Callable[..., Any], options: dict[str, Any]) -> Pattern | None:
    """The pattern of a mask function while compiling, where its pieces cannot be looked at; None is dense.

    transformers' two skip flags promise that nothing was added to plain causal or bidirectional attention; the size of
    a band is a window where the config knows windows and not chunks.
    """
    if function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    config, size = options.get("config"), options.get("local_size")
    chunks = getattr(config, "attention_chunk_size", None) is not None
    if size is None or chunks or size != getattr(config, "sliding_window", None):
        return None
    if options.get("allow_is_bidirectional_skip", False):
        return Pattern(left=size, right=size)
    return Pattern(left=size - 1, right=0) if options.get("allow_is_causal_skip", False) else None


def read(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of one of transformers' mask functions, or None for a function that is not among those known."""
    if function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    maker, _, _ = function.__qualname__.partition(".")
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
    if maker == "and_masks":
        return _all_of(tuple(read(part) for part in held["mask_functions"]))
    if maker == "sliding_window_overlay":
        return Pattern(left=held["sliding_window"] - 1)
    if maker == "sliding_window_bidirectional_overlay":
        return Pattern(left=held["sliding_window"], right=held["sliding_window"])
    if maker == "packed_sequence_mask_function":
        return Pattern(documents=held["packed_sequence_mask"])
    if maker == "remap_positions_for_packed_sequence":  # positions within each document: distances are the same
        return read(held["mask_function"])
    return None


def _all_of(parts: tuple[Pattern | None, ...]) -> Pattern | None:
    """The pattern of what every part shows; None if a part is unknown, or two of them number documents."""
    known = [part for part in parts if part is not None]
    numbered = [part.documents for part in known if part.documents is not None]
    if len(known) < len(parts) or len(numbered) > 1:
        return None
    left, right = (
        min((distance for distance in distances if distance is not None), default=None)
        for distances in zip(*((part.left, part.right) for part in known))
    )
    return Pattern(left, right, numbered[0] if numbered else None)
