"""Reads and adds to the places of a border, on torch tensors."""

from __future__ import annotations

from typing import Any

from attn_core.context_parallel.borders import Border

Tensor = Any


def take_border(tensor: Tensor, border: Border) -> Tensor:
    """Returns the places of a border of ``[batch, places, ...]``, in order."""
    import torch

    pieces = [tensor[:, start:stop] for start, stop in border]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def add_border(tensor: Tensor, border: Border, values: Tensor) -> None:
    """Adds values to the places of a border, in place; leaves out the places that a short block lacks."""
    for (start, stop), piece in zip(border, values.split([stop - start for start, stop in border], 1), strict=True):
        part = tensor[:, start:stop]
        part.add_(piece[:, : part.shape[1]])
