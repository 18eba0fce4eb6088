"""Reads and adds to the places of a border, on torch tensors."""

from __future__ import annotations

from typing import Any

from attn_core.context_parallel.borders import Border

Tensor = Any


def border_pieces(tensor: Tensor, border: Border) -> list[Tensor]:
    """Returns the places of a border of ``[batch, places, ...]``: a view of each range, in order."""
    return [tensor[:, start:stop] for start, stop in border]


def add_border(tensor: Tensor, border: Border, values: Tensor) -> None:
    """Adds values to the places of a border, in place; leaves out the places that a short block lacks."""
    pieces = values.split([stop - start for start, stop in border], 1)
    for place, piece in zip(border_pieces(tensor, border), pieces, strict=True):
        place.add_(piece[:, : place.shape[1]])
