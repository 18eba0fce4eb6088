"""A part's rows from the tiles of its steps: the merged forward, and the gradients added up. On torch tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.context_parallel.on_torch.positions import Places
from attn_core.context_parallel.on_torch.tiles import TileRun

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TileGradients(NamedTuple):
    """Gradients ``[batch, places, heads, dim]`` of a tile's queries and keys, or of a whole block."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class SavedRows(NamedTuple):
    """What the gradients of tiles depend on besides keys: of whole rows q, the results, and their gradients."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def attend(
    steps: Iterable[tuple[object, Sequence[TileRun], Sequence[Tensor]]],
    q: Tensor,
    value_dim: int,
    *,
    covered: bool,
    dtype: torch.dtype,
    lse_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns (out ``[batch, rows, heads, value_dim]``, lse ``[batch, heads, rows]``) of a part's rows.

    Args:
        steps: each step, its tiles and its (k, v); a block of keys is freed before the next one is asked for.
        covered: whether the tiles write every row, so that the output needs no zeros.
        dtype: of out, in which results are merged; lse_dtype: that of lse.
    """
    import torch

    batch, rows, heads = q.shape[:3]
    shape = (batch, rows, heads, value_dim)
    out: Any = None
    lse: Any = None
    for _, tiles, (k, v) in steps:
        for tile in tiles:
            if out is None and tile.rows.is_whole(rows):  # take the first result without a copy
                out, lse = tile.attend(q, k, v)
                out = out.to(dtype)
                continue
            if out is None:
                out = q.new_empty(shape, dtype=dtype)
                lse = q.new_full((batch, heads, rows), -torch.inf, dtype=lse_dtype)
                if not covered:  # rows that no tile writes must be 0
                    tile.rows.zero_others(out) if tile.can_write(tile.rows, dtype) else out.zero_()
            tile.merge_into(q, k, v, out, lse)
        del k, v  # free this block: the next two blocks will be in memory
    if out is None:  # no key is visible
        return q.new_zeros(shape), q.new_full((batch, heads, rows), -torch.inf, dtype=lse_dtype)
    return out, lse


def tile_gradients(tile: TileRun, saved: SavedRows, k: Tensor, v: Tensor) -> TileGradients:
    """Returns the gradients of one tile, from the results of whole rows."""
    inputs, spec = tile.inputs(saved.q, k, v), tile.spec
    rows = [tile.rows.take(saved.out), tile.rows.take(saved.lse, 2).contiguous(), tile.rows.take(saved.dout)]
    rows += [] if saved.dlse is None else [tile.rows.take(saved.dlse, 2)]
    out, lse, dout, *rest = (each[0] for each in rows) if spec.packed else rows
    gradients = tile.backward(spec, inputs, out, lse, dout, rest[0] if rest else None)[:3]
    return TileGradients(*(each[None] if spec.packed else each for each in gradients))


def add_gradients(
    tiles: Iterable[TileRun], saved: SavedRows, k: Tensor, v: Tensor, totals: tuple[Total, Total, Total]
) -> None:
    """Adds the gradients of tiles to the totals of dq, dk and dv."""
    for tile in tiles:
        gradients = tile_gradients(tile, saved, k, v)
        for total, places, gradient in zip(totals, (tile.rows, tile.key_sums, tile.key_sums), gradients, strict=True):
            total.add(places, gradient)
        del gradients, gradient  # free them before the next kernel runs


class Total:
    """Adds up tiles' gradients along an axis of ``size`` places; the other axes are those of ``block``.

    Args:
        buffer: where to compute the sum, or None for new memory; its initial values do not matter.
    """

    def __init__(self, block: Tensor, size: int, dtype: torch.dtype, buffer: Tensor | None = None) -> None:
        self.shape, self.dtype, self.device = (block.shape[0], size, *block.shape[2:]), dtype, block.device
        self._buffer = buffer
        self._sum: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._sum is None

    @classmethod
    def in_place(cls, tensor: Tensor) -> Total:
        """Returns a total that continues the sum in a tensor, in place."""
        total = cls(tensor, tensor.shape[1], tensor.dtype)
        total._sum = tensor
        return total

    def add(self, places: Places, gradient: Tensor) -> None:
        """Adds a tile's gradients. Takes over the first tensor itself if it covers all places."""
        if self._sum is not None:
            places.add(self._sum, gradient)
        elif self._buffer is None and places.is_whole(self.shape[1]):
            self._sum = gradient.to(self.dtype)
        elif places.distinct:
            self._sum = self._allocate(zeros=not places.is_whole(self.shape[1]))
            places.put(self._sum, gradient)
        else:
            places.add(self.tensor(), gradient)

    def tensor(self) -> Tensor:
        """Returns the sum; zeros if nothing was added."""
        if self._sum is None:
            self._sum = self._allocate(zeros=True)
        return self._sum

    def _allocate(self, *, zeros: bool) -> Tensor:
        import torch

        if self._buffer is not None:
            return self._buffer.zero_() if zeros else self._buffer
        return (torch.zeros if zeros else torch.empty)(self.shape, dtype=self.dtype, device=self.device)
