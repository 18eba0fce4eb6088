"""Runs a call with key ranges in parts on torch tensors: forward and gradients on one device, without exchanges."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared.rewrites import sink_gradient, with_sinks
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel import index_arrays
from attn_core.context_parallel.on_torch import rows
from attn_core.context_parallel.on_torch.rows import SavedRows, Total, add_gradients
from attn_core.context_parallel.on_torch.tiles import RowCoverage, TileRun, build_tile_run
from attn_core.context_parallel.one_device import Tiled

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PartsPlan(NamedTuple):
    """A call in parts, ready to run.

    Attributes:
        spec: the call as a whole.
        backend: of the parts; the first one if there are several.
        batch: the number of batch rows. The tiles read them end to end, as one row.
        tiles: the kernel calls, in order.
        covered: whether the tiles write every row.
        dtypes: in which results and gradients of q, and gradients of k and v, are added up.
        lse_dtype: of the log-sum-exps.
    """

    spec: AttentionSpec
    backend: str
    batch: int
    tiles: tuple[TileRun, ...]
    covered: bool
    dtypes: tuple[Any, Any]
    lse_dtype: Any


def build(spec: AttentionSpec, found: Tiled, device: torch.device, wrap: Callable[[Any], Any]) -> PartsPlan:
    """Prepares a call on a torch.device. ``wrap`` is applied to the backends' functions."""
    import torch

    call, tiles = found.call, []
    coverage = RowCoverage(call.spec.q_len)
    for tile in (each for step in call.plan.steps for each in step.tiles[0]):
        of_rows, of_keys = index_arrays.places_of_tile(tile)
        tiles.append(build_tile_run(call, tile, (of_rows, of_keys, of_keys), device, coverage, wrap))
    dtypes = (getattr(torch, call.accumulator("q", 0)), getattr(torch, call.accumulator("own", 0)))
    lse_dtype = getattr(torch, call.spec.lse_dtype)
    return PartsPlan(spec, found.backends[0], found.rows, tuple(tiles), coverage.complete, dtypes, lse_dtype)


def forward(plan: PartsPlan, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (out ``[batch, q_len, heads, value_dim]``, lse ``[batch, heads, q_len]``); -inf in rows without keys."""
    batch, q_len = q.shape[:2]
    row, keys, values = (_in_one_row(plan, tensor) for tensor in (q, k, v))
    dtypes = {"dtype": plan.dtypes[0], "lse_dtype": plan.lse_dtype}
    out, lse = rows.attend([(None, plan.tiles, (keys, values))], row, v.shape[3], covered=plan.covered, **dtypes)
    if sinks is not None:  # once for whole rows, because each tile would count the sink again
        out, lse = with_sinks(out, lse, sinks)
    out = out.to(q.dtype)
    if plan.batch == 1:
        return out, lse
    return out.unflatten(1, (batch, q_len))[0], lse[0].unflatten(1, (batch, q_len)).movedim(0, 1)


def backward(
    plan: PartsPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns (dq, dk, dv, dsinks) from the results of ``forward`` and their gradients; dout may be None for zeros."""
    dout = out.new_zeros(out.shape) if dout is None else dout
    dsinks = None if sinks is None else sink_gradient(sinks, out, lse, dout, dlse)
    row, keys, values, results, cotangent = (_in_one_row(plan, tensor) for tensor in (q, k, v, out, dout))
    if plan.batch > 1:  # [batch, heads, q_len] -> [1, heads, batch * q_len]
        lse, dlse = (None if each is None else each.movedim(0, 1).flatten(1)[None] for each in (lse, dlse))
    saved = SavedRows(row, results, lse, cotangent, dlse)
    of_queries, of_keys = plan.dtypes
    totals = (
        Total(row, row.shape[1], of_queries),
        Total(keys, keys.shape[1], of_keys),
        Total(values, values.shape[1], of_keys),
    )
    add_gradients(plan.tiles, saved, keys, values, totals)
    dq, dk, dv = (
        total.tensor().to(tensor.dtype).view(tensor.shape) for total, tensor in zip(totals, (q, k, v), strict=True)
    )
    return dq, dk, dv, dsinks


def _in_one_row(plan: PartsPlan, tensor: Tensor) -> Tensor:
    """Returns ``[batch, tokens, heads, dim]`` as ``[1, batch * tokens, heads, dim]`` if there are several rows."""
    return tensor if plan.batch == 1 else tensor.flatten(0, 1)[None]
