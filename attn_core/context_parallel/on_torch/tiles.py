"""One tile as a call of a backend on torch tensors, and the merge of its result into the results of its rows.

Triton's kernels and torch's pauses run on the current GPU; a pause gives an exchange a head start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attn_core import backends
from attn_core.backends.shared.torch_ranges import in_range_if_on
from attn_core.backends.shared.triton import has_triton
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.context_parallel.call import ContextCall
from attn_core.context_parallel.on_torch.positions import Places
from attn_core.context_parallel.tiles import Tile

if TYPE_CHECKING:
    import torch
    from torch import Tensor


HEAD_START = 10_000
"""GPU clock cycles, about 5 microseconds."""


def with_current(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which a ``torch.device`` with a GPU is the current one. It does nothing if it is already:
    usually each rank has set its own, and torch's context would take microseconds."""
    import torch

    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def head_start(device: torch.device) -> None:
    """Delays the compute stream by about 5 us, so that a collective starts before the next kernel occupies every SM.

    The order of work on two streams is not defined. A collective that starts second waits for the kernel, and nothing
    overlaps. If the stream waits for the collective next, the delay costs nothing, because the collective takes longer.
    Does nothing on a CPU.

    Args:
        device: a ``torch.device``; the kernel will run on its current stream.
    """
    if device.type == "cuda":
        import torch

        with with_current(device):
            # A kernel that spins on the GPU. While the GPU has queued work, a pause of the host would delay nothing.
            torch.cuda._sleep(HEAD_START)  # type: ignore[no-untyped-call, unused-ignore]


class TileRun(NamedTuple):
    """A tile as a call of a backend.

    Attributes:
        forward, backward: the backend's functions.
        writes: whether ``forward`` takes buffers for its results.
        rows, keys: the places of its queries and keys in the operands.
        key_sums: the places where its keys' gradients are added up.
        first: whether no earlier tile has a result for its queries.
    """

    spec: AttentionSpec
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    writes: bool
    rows: Places
    keys: Places
    key_sums: Places
    cu_seqlens: tuple[Tensor, Tensor] | None
    first: bool

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> Inputs:
        """Returns the tile's operands; packed operands have no batch axis."""
        q, k, v = self.rows.take(q), self.keys.take(k), self.keys.take(v)
        if self.cu_seqlens is None:
            return Inputs(q, k, v)
        return Inputs(q[0], k[0], v[0], cu_seqlens_q=self.cu_seqlens[0], cu_seqlens_k=self.cu_seqlens[1])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *buffers: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Returns (out ``[batch, rows, heads, value_dim]``, lse ``[batch, heads, rows]``)."""
        out, lse = self.forward(self.spec, self.inputs(q, k, v), *buffers)
        return (out[None], lse[None]) if self.spec.packed else (out, lse)

    def can_write(self, places: Places, dtype: torch.dtype) -> bool:
        """Returns whether the kernel can write a result to these places of ``[batch, places, heads, dim]``.

        This saves a copy if they are not all places: a rank's documents are its shard without the padding.
        """
        # Buffers are contiguous, and a range of places is contiguous if there is one row.
        return self.writes and dtype == _dtype(self.spec.dtype) and self.spec.batch == 1 and places.is_one_range

    def merge_into(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scratch: tuple[Tensor, ...] = ()
    ) -> None:
        """Merges the tile's results into its rows of out and lse, in place; overwrites the rows if it is ``first``.

        Args:
            scratch: buffers of ``spec.out_shape`` and ``spec.lse_shape`` of a kernel that ``writes``; else ().
        """
        if not (self.first and self.can_write(self.rows, out.dtype)):
            _merge_tile(self, out, lse, *self.attend(q, k, v, *([scratch] if scratch else [])))
            return
        buffer = self.rows.take(out)
        buffer = buffer[0] if self.spec.packed else buffer
        of_lse = scratch[1] if scratch else q.new_empty(self.spec.lse_shape, dtype=_dtype(self.spec.lse_dtype))
        result, of_lse = self.forward(self.spec, self.inputs(q, k, v), (buffer, of_lse))
        # A kernel may return another tensor than the buffer, for example if the buffer is not aligned for it.
        if result is not buffer:
            buffer.copy_(result)
        self.rows.put(lse, of_lse[None] if self.spec.packed else of_lse, 2)


def build_tile_run(
    call: ContextCall,
    tile: Tile,
    places: tuple[np.ndarray, np.ndarray, np.ndarray],
    device: torch.device,
    coverage: RowCoverage,
    wrap: Callable[[Any], Any] = lambda function: function,
) -> TileRun:
    """Prepares a tile on a torch.device.

    Args:
        places: of its rows, its keys and its keys' sums.
        coverage: the rows of the tiles before it; records the tile's rows.
        wrap: applied to the backend's functions.
    """
    spec, name = call.backend_of(tile)
    backend = backends.load(name, device.type)
    cu_seqlens = None
    if spec.packed:
        import torch

        # Kernels take packed offsets in int32.
        q, k = (torch.tensor(side, dtype=torch.int32, device=device) for side in tile.offsets)
        cu_seqlens = q, k
    rows, keys = (Places(index, device) for index in places[:2])
    # Keys that are not gathered have the same places in both; one object saves a second index on the device.
    key_sums = keys if places[2] is places[1] else Places(places[2], device)
    forward = in_range_if_on(wrap(backend.forward), name, "forward")
    backward: Any = backend.backward and in_range_if_on(wrap(backend.backward), name, "backward")
    writes = bool(backend.writes_into)
    return TileRun(spec, forward, backward, writes, rows, keys, key_sums, cu_seqlens, coverage.add(places[0]))


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


class RowCoverage:
    """Tracks which rows have a result while tiles run in order.

    Args:
        rows: the number of rows.
        before: whether every row has a result already, from an earlier step.
    """

    def __init__(self, rows: int, *, before: bool = False) -> None:
        self._touched, self._initialised = np.full(rows, before), np.full(rows, before)

    def add(self, rows: np.ndarray) -> bool:
        """Records a tile's rows; returns whether no earlier tile had any of them, so that the tile may overwrite."""
        first = not self._touched[rows].any()
        self._touched[rows] = True
        # A tile whose rows have some result already is merged into all of them, so its new rows must hold 0 and -inf.
        self._initialised[rows] |= first
        return first

    @property
    def complete(self) -> bool:
        """Whether tiles that overwrite their rows cover every row."""
        return bool(self._initialised.all())


def _merge_tile(run: TileRun, out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges a tile's results into its rows of out and lse, in place; overwrites the rows if the tile is ``first``."""
    rows = run.rows
    if run.first:
        rows.put(out, part_out)
        rows.put(lse, part_lse, 2)
        return
    before, before_lse = rows.take(out), rows.take(lse, 2)
    merge(before, before_lse, part_out, part_lse)
    if not rows.is_one_range:  # of one range, ``before`` is a view
        rows.put(out, before)
        rows.put(lse, before_lse, 2)


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merges the results over further keys, ``part_out`` and ``part_lse``, into ``out`` and ``lse``, in place.

    Let l be the larger log-sum-exp (0 if both are -inf), a = e^(lse - l) and b = e^(part_lse - l). The new log-sum-exp
    is l + log(a + b), and out becomes (a / (a + b)) out + (b / (a + b)) part_out. (Milakov and Gimelshein 2018; Dao et
    al. 2022.) With one weight, as out + w (part_out - out), an output of little weight would leave its rounding error.

    Args:
        out: ``[batch, rows, heads, value_dim]``, of any dtype.
        lse: ``[batch, heads, rows]``, float32 or float64, the dtype of the arithmetic.
        part_out, part_lse: the same shapes; part_out of any dtype.
    """
    import torch

    # The Triton kernel computes in float32, which would lose the precision of float64.
    if out.is_cuda and lse.dtype == torch.float32 and has_triton():
        from attn_core.context_parallel.on_torch.merge_triton import merge as merge_on_gpu

        with with_current(out.device):
            merge_on_gpu(out, lse, part_out, part_lse)
        return
    larger = torch.maximum(lse, part_lse)
    # -inf - -inf would be NaN in rows that neither result gave a key.
    larger = larger.masked_fill(larger == -torch.inf, 0.0)
    weight, part_weight = (lse - larger).exp_(), (part_lse - larger).exp_()
    total = weight + part_weight
    lse.copy_(larger + total.log())
    total.masked_fill_(total == 0, 1.0)  # both results are 0 in such a row
    by_row = [each.div_(total).transpose(1, 2)[..., None] for each in (weight, part_weight)]
    out.copy_(by_row[0] * out + by_row[1] * part_out)
