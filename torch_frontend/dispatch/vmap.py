"""The vmap rule of the ops on a call (see ``op_arguments.Op``).

The rule folds the mapped axis into the batch, or runs the mapped elements one after another if it cannot fold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from attn_core.call.tensors import Inputs
from attn_core.errors import ShapeError
from torch_frontend.dispatch.op_arguments import Op, OpOptions, from_call

Tensor = torch.Tensor
Dims = Sequence[int | None]
"""The mapped axis of each tensor, None for one that all elements share."""
MappedResults = tuple[Any, Any]
"""The results of a rule and their mapped axes; without tuples around them for an op of one result."""

_ROWS = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "max_logit")
"""Operands and results whose first axis is the batch."""
_TABLES = {"mask": 4, "bias": 4, "dbias": 4, "alibi_slopes": 2, "key_ranges": 5}
"""Operands that broadcast to this many axes, batch first."""


def rule(
    op: Op, run: Callable[..., Tensor | tuple[Tensor, ...]], info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> MappedResults:
    """Maps an op over ``info.batch_size`` elements.

    Args:
        run: the op, or a function with its signature.
    """
    inputs, how = from_call(op.call_of(arguments))
    names = (*op.own, *Inputs._fields)
    tensors, dims = dict(zip(names, arguments)), dict(zip(names, in_dims))
    options = arguments[len(names) :]

    def attend(*tensors: Tensor | None) -> tuple[Tensor, ...]:
        results = run(*tensors, *options)
        return results if isinstance(results, tuple) else (results,)

    if _cannot_fold(op, inputs, dims, how):
        results = one_by_one(attend, info.batch_size, list(tensors.values()), list(dims.values()))
        # All elements have the same shapes and options, so they ran on one backend: its index needs no mapped axis.
        named = {name: (each[0], None) if name == "chosen" else (each, 0) for name, each in zip(op.results, results)}
    else:
        batch = _batch(inputs, dims["q"])
        folded = _fold(info.batch_size, batch, tensors, dims)
        named = {
            name: (each.unflatten(0, (info.batch_size, batch)), 0) if name in _ROWS else (each, None)
            for name, each in zip(op.results, attend(*folded))
        }
    if len(named) == 1:
        return next(iter(named.values()))
    return tuple([result for result, _ in named.values()]), tuple([dim for _, dim in named.values()])


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


def _cannot_fold(op: Op, inputs: Inputs, dims: Mapping[str, int | None], how: OpOptions) -> bool:
    """Returns whether the mapped axis has no place: offsets, mapped sinks and dropout's words have no batch axis, and
    functions may count the batch rows. A gradient that is a sum over the batch would also be one over the elements.
    """
    functions = how.options.mask_mod is not None or how.options.score_mod is not None
    sinks = dims["sinks"] is not None or dims.get("dsinks") is not None
    sums = how.bias_gradient or inputs.sinks is not None or bool(how.options.aux_gradients)
    sums = op.sums_over_batch and sums
    return inputs.cu_seqlens_q is not None or sinks or how.options.dropout != 0 or functions or sums


def _batch(inputs: Inputs, dim: int | None) -> int:
    # The batch is the first of q's own axes: the second of all if the mapped axis is in front.
    return inputs.q.shape[0 if dim is None or dim > 0 else 1]


def _fold(
    size: int, batch: int, tensors: Mapping[str, Tensor | None], dims: Mapping[str, int | None]
) -> list[Tensor | None]:
    """Returns the tensors of one call whose batch is ``size * batch``."""
    folded: list[Any] = []
    for (name, tensor), dim in zip(tensors.items(), dims.values()):
        if tensor is None:
            folded.append(None)
        elif name in _ROWS:
            folded.append(_mapped_first(size, tensor, dim).flatten(0, 1))  # [size, batch, ...] -> [size * batch, ...]
        elif name in _TABLES:
            folded.append(_fold_table(size, batch, tensor, dim, _TABLES[name]))
        else:  # the index of the backend, which all elements share
            folded.append(tensor if dim is None else tensor.select(dim, 0))
    return folded


def _fold_table(size: int, batch: int, part: Tensor, dim: int | None, axes: int) -> Tensor:
    """Folds a tensor that broadcasts to ``axes`` axes, batch first; unchanged if all batch entries share it."""
    # Without a batch axis, or with one of size 1, it broadcasts over the folded batch as it is.
    if dim is None and (part.dim() < axes or part.shape[0] == 1):
        return part
    mapped = _mapped_first(size, part, dim)
    rest = mapped.shape[1:]
    mapped = mapped.reshape(size, *(1,) * (axes - len(rest)), *rest)  # [size, batch or 1, ...]
    return mapped.expand(size, batch, *mapped.shape[2:]).flatten(0, 1)


def _mapped_first(size: int, part: Tensor, dim: int | None) -> Tensor:
    return part.expand(size, *part.shape) if dim is None else part.movedim(dim, 0)  # expand: a view, no copy
