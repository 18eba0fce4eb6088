"""Reads, writes and adds to some places of an axis of positions, on torch tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from attn_core.call.after_fork import lazy_property
from attn_core.context_parallel.borders import Border
from attn_core.context_parallel.index_arrays import contiguous_ranges

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Places:
    """Places in an order: a few contiguous ranges, or an index on the device. A place may occur twice.

    Attributes:
        is_one_range: whether ``take`` copies nothing.
    """

    def __init__(self, index: np.ndarray, device: torch.device) -> None:
        self.count = len(index)
        self._index = index
        self.ranges = contiguous_ranges(index)
        self.is_one_range = self.ranges is not None and len(self.ranges) < 2
        self._start = self.ranges[0][0] if self.ranges else 0
        self.index: Any = None
        if self.ranges is None:
            import torch

            # Copied to the device once, when the call is planned, so that a warm call copies nothing from the host.
            self.index = torch.from_numpy(index).to(device)

    @lazy_property
    def distinct(self) -> bool:
        """Whether no place occurs twice."""
        return len(np.unique(self._index)) == self.count

    def is_whole(self, size: int) -> bool:
        """Returns whether these are all ``size`` places of an axis, in order."""
        return self.ranges == [(0, size)] or size == self.count == 0

    def take(self, tensor: Tensor, axis: int = 1) -> Tensor:
        """Returns the tensor's entries at these places: itself or a view of one contiguous range, else a copy."""
        if self.ranges is None:
            return tensor.index_select(axis, self.index)
        if self.is_one_range:
            return tensor if tensor.shape[axis] == self.count else tensor.narrow(axis, self._start, self.count)
        result = tensor.new_empty((*tensor.shape[:axis], self.count, *tensor.shape[axis + 1 :]))
        for source, piece in self._pieces(tensor, result, axis):
            piece.copy_(source)
        return result

    def put(self, tensor: Tensor, values: Tensor, axis: int = 1) -> None:
        """Writes values to these places of a tensor."""
        if self.ranges is None:
            # index_copy_ takes values of one dtype only, and copy_ below converts.
            tensor.index_copy_(axis, self.index, values.to(tensor.dtype))
        for target, piece in self._pieces(tensor, values, axis):
            target.copy_(piece)

    def zero_others(self, tensor: Tensor) -> None:
        """Sets a tensor to 0 before and behind these places of its axis 1, which are one range."""
        start, stop = self.ranges[0] if self.ranges else (0, 0)
        tensor[:, :start].zero_()
        tensor[:, stop:].zero_()

    def add(self, tensor: Tensor, values: Tensor, axis: int = 1) -> None:
        """Adds values to these places of a tensor, in the tensor's dtype, in the order of the places."""
        if self.ranges is None:
            # As index_copy_: values must have the tensor's dtype.
            tensor.index_add_(axis, self.index, values.to(tensor.dtype))
        for target, piece in self._pieces(tensor, values, axis):
            target.add_(piece)

    def _pieces(self, tensor: Tensor, values: Tensor, axis: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields views of each range and of its values; nothing if the places are an index."""
        at = 0
        for start, stop in self.ranges or ():
            yield tensor.narrow(axis, start, stop - start), values.narrow(axis, at, stop - start)
            at += stop - start

    def scatter(self, values: Tensor, size: int, axis: int = 1) -> Tensor:
        """Returns a tensor of ``size`` places with the values at these places and zeros elsewhere."""
        if self.is_whole(size):
            return values
        shape = (*values.shape[:axis], size, *values.shape[axis + 1 :])
        # As many places as the axis has: every place is written, so no zeros are needed.
        result = values.new_empty(shape) if self.count == size else values.new_zeros(shape)
        self.put(result, values, axis)
        return result


class GatheredPlaces:
    """Places to read, in an order, from the gathered blocks of several parts, ``size`` places each."""

    def __init__(self, index: np.ndarray, size: int, device: torch.device) -> None:
        self.count = len(index)
        ranges = contiguous_ranges(index)
        self._ranges = (
            None
            if ranges is None
            else [  # cut at the ends of blocks
                (part, max(start - part * size, 0), min(stop - part * size, size))
                for start, stop in ranges
                # A range may continue from one block into the next, and blocks are not next to each other in memory.
                for part in range(start // size, (stop - 1) // size + 1)
            ]
        )
        if ranges is None:
            import torch

            self._part, self._place = (torch.from_numpy(each).to(device) for each in (index // size, index % size))

    def take(self, tensor: Tensor) -> Tensor:
        """Returns ``[..., count, heads, dim]`` of ``[parts, ..., size, heads, dim]``: a view or a copy."""
        if self._ranges is None:
            # Two adjacent index arrays become one axis in their place, so bring parts and places together first.
            return tensor.movedim(-3, 1)[self._part, self._place].movedim(0, -3)
        if len(self._ranges) == 1:
            part, start, stop = self._ranges[0]
            return tensor[part].narrow(-3, start, stop - start)
        result = tensor.new_empty((*tensor.shape[1:-3], self.count, *tensor.shape[-2:]))
        at = 0
        for part, start, stop in self._ranges:
            result.narrow(-3, at, stop - start).copy_(tensor[part].narrow(-3, start, stop - start))
            at += stop - start
        return result


def border_pieces(tensor: Tensor, border: Border) -> list[Tensor]:
    """Returns the places of a border of ``[batch, places, ...]``: a view of each range, in order."""
    return [tensor[:, start:stop] for start, stop in border]


def add_border(tensor: Tensor, border: Border, values: Tensor) -> None:
    """Adds values to the places of a border of a tensor, in place; leaves out the places that a short block lacks."""
    pieces = values.split([stop - start for start, stop in border], 1)
    for place, piece in zip(border_pieces(tensor, border), pieces, strict=True):
        place.add_(piece[:, : place.shape[1]])
