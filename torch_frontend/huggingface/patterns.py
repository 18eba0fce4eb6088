"""Reads transformers' mask functions: a function of indices becomes a band of visible keys and packed documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import masking_utils  # at module level, because older compilers cannot trace a lazy module's import

Tensor = torch.Tensor


class Pattern(NamedTuple):
    """A mask function as data: a query at position i sees a key at position j iff ``-left <= j - i <= right``.

    None means unbounded. ``documents [batch, tokens]``, if any, has each token's document number in packed rows.
    ``blocks [batch, tokens]``, if any, has the number of each token's block, -1 for none: besides, tokens of one block
    see each other.
    """

    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    blocks: Tensor | None = None


def read_pattern(function: Callable[..., object]) -> Pattern | None:
    """Returns the pattern of one of transformers' own mask functions, or None for any other function.

    transformers builds a mask function from nested closures, so their names and cells tell what it computes.
    """
    if function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    factory, cells = _made_by(function)
    if factory == "and_masks":
        return _intersection(tuple(read_pattern(part) for part in cells["mask_functions"]))
    if factory == "or_masks":
        return _union(cells["mask_functions"])
    if factory == "sliding_window_overlay":
        return Pattern(left=cells["sliding_window"] - 1)
    if factory == "sliding_window_bidirectional_overlay":
        # A bidirectional window is a distance to either side; a causal one counts keys, the query's own included.
        return Pattern(left=cells["sliding_window"], right=cells["sliding_window"])
    if factory == "packed_sequence_mask_function":
        return Pattern(documents=cells["packed_sequence_mask"])
    if factory == "remap_positions_for_packed_sequence":  # positions within each document: distances are the same
        return read_pattern(cells["mask_function"])
    return None


def _made_by(function: Callable[..., object]) -> tuple[str, dict[str, Any]]:
    """Returns the name of the function that made a closure, and what the closure holds, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return function.__qualname__.partition(".")[0], dict(zip(function.__code__.co_freevars, cells))


def _union(parts: tuple[Callable[..., object], ...]) -> Pattern | None:
    """Returns the pattern of a causal mask and blocks of tokens that see each other; None for any other union."""
    if len(parts) != 2 or getattr(parts[1], "__module__", None) != masking_utils.__name__:
        return None
    band, (factory, cells) = read_pattern(parts[0]), _made_by(parts[1])
    if factory != "blockwise_overlay" or band is None or band.right != 0 or band.documents is not None:
        return None
    return band._replace(blocks=cells["block_sequence_ids"]) if band.blocks is None else None


def infer_pattern(function: Callable[..., object], options: Mapping[str, Any]) -> Pattern | None:
    """Returns the pattern of a mask function while compiling, when closures cannot be read; None: build a dense mask.

    transformers' two skip flags promise that nothing was added to plain causal or bidirectional attention. The band's
    size is a window if the config has windows and no chunks.
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


def _intersection(parts: tuple[Pattern | None, ...]) -> Pattern | None:
    """Returns the pattern of keys visible in every part; None if a part is unknown or two parts have documents."""
    known = [part for part in parts if part is not None]
    if any(part.blocks is not None for part in known):
        return None
    documents = [part.documents for part in known if part.documents is not None]
    if len(known) < len(parts) or len(documents) > 1:
        return None
    left, right = (
        min((distance for distance in distances if distance is not None), default=None)
        for distances in zip(*((part.left, part.right) for part in known))
    )
    return Pattern(left, right, documents[0] if documents else None)
