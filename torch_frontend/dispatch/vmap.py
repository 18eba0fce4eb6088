"""The vmap rules of ``attn::forward`` and ``attn::backward`` (see ops).

A rule folds the mapped axis into the batch, or runs the mapped elements one after another if it cannot fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from attn_core.call.tensors import Inputs, Tangents
from attn_core.errors import ShapeError
from torch_frontend.dispatch.op_arguments import OpOptions

Tensor = torch.Tensor
Dims = Sequence[int | None]
"""The mapped axis of each tensor, None for one that all elements share."""
MappedResults = tuple[tuple[Tensor, ...], tuple[int | None, ...]]
"""The results of a rule and their mapped axes."""


def forward(
    run: Callable[..., tuple[Tensor, ...]], size: int, inputs: Inputs, dims: Inputs, how: OpOptions
) -> MappedResults:
    """Maps ``run(*inputs) -> (out, lse, chosen)`` over ``size`` elements."""
    if _cannot_fold(inputs, dims, how):
        # All elements have the same shapes and options, so they ran on one backend: its index needs no mapped axis.
        out, lse, chosen = one_by_one(run, size, inputs, dims)
        return (out, lse, chosen[0]), (0, 0, None)
    batch = _batch(inputs, dims)
    out, lse, chosen = run(*_fold(size, batch, inputs, dims))
    return (out.unflatten(0, (size, batch)), lse.unflatten(0, (size, batch)), chosen), (0, 0, None)


def backward(
    run: Callable[..., tuple[Tensor, ...]],
    size: int,
    saved: Sequence[Tensor | None],
    saved_dims: Dims,
    inputs: Inputs,
    dims: Inputs,
    how: OpOptions,
    summed: bool,
) -> MappedResults:
    """Maps ``run(dout, dlse, out, lse, chosen, *inputs) -> (dq, dk, dv, dbias, dsinks, ...)`` over ``size`` elements.

    Args:
        summed: whether ``run`` sums a gradient over the batch (dbias, dsinks, daux). Folding would then also sum over
            the mapped elements.
    """
    if summed or _cannot_fold(inputs, dims, how):
        results = one_by_one(run, size, (*saved, *inputs), (*saved_dims, *dims))
        return results, (0,) * len(results)
    batch, (*rows, chosen), at = _batch(inputs, dims), saved, saved_dims[-1]
    folded = [None if part is None else _fold_rows(size, part, dim) for part, dim in zip(rows, saved_dims)]
    chosen = chosen if at is None or chosen is None else chosen.select(at, 0)
    gradients = run(*folded, chosen, *_fold(size, batch, inputs, dims))
    return (*(part.unflatten(0, (size, batch)) for part in gradients[:3]), *gradients[3:]), (0, 0, 0, None, None)


def jvp(
    run: Callable[..., tuple[Tensor, ...]],
    size: int,
    tangents: tuple[Tangents, Tangents],
    inputs: Inputs,
    dims: Inputs,
    how: OpOptions,
) -> MappedResults:
    """Maps ``run(*tangents, *inputs) -> (dout, dlse)`` over ``size`` elements.

    Args:
        tangents: the tangents, and their mapped axes.
    """
    moved, moved_dims = tangents
    if _cannot_fold(inputs, dims, how) or moved_dims.dsinks is not None:
        results = one_by_one(run, size, (*moved, *inputs), (*moved_dims, *dims))
        return results, (0,) * len(results)
    batch = _batch(inputs, dims)
    rows = [None if each is None else _fold_rows(size, each, dim) for each, dim in zip(moved[:3], moved_dims)]
    bias = _fold_table(size, batch, moved.dbias, moved_dims.dbias, axes=4)
    dout, dlse = run(*rows, bias, moved.dsinks, *_fold(size, batch, inputs, dims))
    return (dout.unflatten(0, (size, batch)), dlse.unflatten(0, (size, batch))), (0, 0)


def max_logit(
    run: Callable[..., tuple[Tensor, ...]], size: int, inputs: Inputs, dims: Inputs, how: OpOptions
) -> MappedResults:
    """Maps ``run(*inputs) -> (max_logit,)`` over ``size`` elements."""
    if _cannot_fold(inputs, dims, how):
        return one_by_one(run, size, inputs, dims), (0,)
    batch = _batch(inputs, dims)
    (result,) = run(*_fold(size, batch, inputs, dims))
    return (result.unflatten(0, (size, batch)),), (0,)


def one_by_one(
    run: Callable[..., tuple[Tensor, ...]], size: int, tensors: Sequence[Any], dims: Dims
) -> tuple[Tensor, ...]:
    """Runs every mapped element as its own call and stacks the results along a new first axis."""
    if size == 0:
        raise ShapeError("vmap: expected 1 or more elements of a call that is mapped element by element, got 0")
    results = [
        run(*(part if dim is None else part.select(dim, at) for part, dim in zip(tensors, dims))) for at in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*results))


def _cannot_fold(inputs: Inputs, dims: Inputs, how: OpOptions) -> bool:
    """Returns whether the mapped axis has no place: offsets, mapped sinks and dropout's words have no batch axis, and
    functions may count the batch rows."""
    functions = how.options.mask_mod is not None or how.options.score_mod is not None
    return inputs.cu_seqlens_q is not None or dims.sinks is not None or how.options.dropout != 0 or functions


def _batch(inputs: Inputs, dims: Inputs) -> int:
    # The batch is the first of q's own axes: the second of all if the mapped axis is in front.
    return inputs.q.shape[0 if dims.q is None or dims.q > 0 else 1]


def _fold(size: int, batch: int, inputs: Inputs, dims: Inputs) -> Inputs:
    """Returns the tensors of one call whose batch is ``size * batch``."""
    q, k, v = (_fold_rows(size, part, dim) for part, dim in zip(inputs[:3], dims))
    mask = _fold_table(size, batch, inputs.mask, dims.mask, axes=4)
    bias = _fold_table(size, batch, inputs.bias, dims.bias, axes=4)
    slopes = _fold_table(size, batch, inputs.alibi_slopes, dims.alibi_slopes, axes=2)
    ranges = _fold_table(size, batch, inputs.key_ranges, dims.key_ranges, axes=5)
    return Inputs(q, k, v, mask, bias, slopes, inputs.sinks, key_ranges=ranges)


def _fold_rows(size: int, part: Tensor, dim: int | None) -> Tensor:
    """Folds ``[batch, ...]``, mapped along ``dim``, into ``[size * batch, ...]``."""
    return _mapped_first(size, part, dim).flatten(0, 1)


def _fold_table(size: int, batch: int, part: Any, dim: int | None, axes: int) -> Any:
    """Folds a tensor that broadcasts to ``axes`` axes, batch first; unchanged if all batch entries share it."""
    # Without a batch axis, or with one of size 1, it broadcasts over the folded batch as it is.
    if part is None or (dim is None and (part.dim() < axes or part.shape[0] == 1)):
        return part
    mapped = _mapped_first(size, part, dim)
    rest = mapped.shape[1:]
    mapped = mapped.reshape(size, *(1,) * (axes - len(rest)), *rest)  # [size, batch or 1, ...]
    return mapped.expand(size, batch, *mapped.shape[2:]).flatten(0, 1)


def _mapped_first(size: int, part: Tensor, dim: int | None) -> Tensor:
    return part.expand(size, *part.shape) if dim is None else part.movedim(dim, 0)  # expand: a view, no copy
