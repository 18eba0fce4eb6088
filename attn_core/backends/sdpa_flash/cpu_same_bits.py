"""torch's CPU flash kernel for calls with ``invariant``: no bit depends on the batch, nor on how many threads share it.

torch divides a call by heads and rows of the batch among threads, so another batch brings a head to another thread:

- A single head alone is shared among threads in another order of sums. It is computed twice, as two rows of a batch.
- Each thread has memory for scores and sums, which begins where that of the thread before ends. With fewer than ROWS
  queries it may begin at any number, and the library behind torch adds in another order at another alignment on some
  processors (seen on an AMD EPYC, not on an Intel Xeon). There such a call is filled up to ROWS queries.
- On these processors, rows of a batch whose heads are not aligned differ by their place, too. There heads are filled up
  to a multiple of WIDTHS channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from itertools import product
from typing import Any

from attn_core.backends.sdpa_flash.cpu_kernel import kernels
from attn_core.backends.sdpa_flash.cpu_rows import (
    ROWS,
    TILE,
    Shape,
    same,
    same_in_a_batch,
    trials,
    without_modes,
)
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FORWARD, BACKWARD = 3, 6
"""The tensors of a forward, q, k and v, and of a backward: dout, q, k, v, out and lse. They come first."""
OF_QUERIES = {FORWARD: (0,), BACKWARD: (0, 1, 4, 5)}
"""Which of them have queries."""
FEW = (1, 2, 3, 5, 8, 16, 31)
"""Numbers of queries that are tried; the memory of a thread has the others' remainders."""
KEYS = (3, 8, 9, 15, 17, 31, 36, 65, 100, 129, 300, 516)
WIDTHS = 16
"""Channels whose size is a multiple of every alignment in float32, and in half precision of that of a vector."""
MANY = (33, 67, 100)
"""Numbers of queries and keys with which rows of odd heads are tried."""


def kernels_of(spec: AttentionSpec) -> tuple[Any, Any]:
    """Returns ``kernels``; for a call with ``invariant`` those whose bits do not depend on the batch."""
    import torch

    ops, threads = kernels(), torch.get_num_threads()
    if spec.invariant is None or threads == 1:
        return ops
    if not keeps_few_queries(Shape(spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, threads)):
        ops = _filled(ops[0], FORWARD), _filled(ops[1], BACKWARD)
    if spec.batch * spec.num_kv_heads == 1:
        ops = _twice(ops[0], FORWARD), _twice(ops[1], BACKWARD)
    return ops


@lru_cache(maxsize=1024)
@without_modes
def keeps_few_queries(shape: Shape) -> bool:
    """Returns whether fewer than ROWS queries of a row have the bits in a batch that they have alone; tried once."""
    if shape.threads == 1:
        return True
    # In bfloat16 another library multiplies, and filling a lone query costs most, so only its own trial counts.
    return (shape.dtype == "bfloat16" or ignores_alignment()) and _keeps_rows(shape, FEW, KEYS)


@lru_cache(maxsize=1024)
@without_modes
def keeps_heads(shape: Shape) -> bool:
    """Returns whether a row has its own bits in a batch, although its heads are not aligned; tried once."""
    return shape.head_dim % WIDTHS == 0 or (ignores_alignment() and _keeps_rows(shape, MANY, MANY))


@cache
def ignores_alignment() -> bool:
    """Returns whether this processor's library adds in one order at every alignment; tried once, with odd heads.

    If not, calls are filled although a trial of their own shape finds nothing: a window has other products.
    """
    shapes = (Shape(dtype, 3, 3, dim, 1) for dtype in ("float32", "float64") for dim in (7, 11, 19))
    return all(map(without_modes(lambda shape: _keeps_rows(shape, MANY, MANY)), shapes))


@lru_cache(maxsize=1024)
@without_modes
def keeps_heights(shape: Shape) -> bool:
    """Returns whether a tile of fewer rows and keys has the bits of a whole one; tried once. An AMD EPYC has others in
    float64."""
    for trial in trials(shape):
        whole, *parts = (
            kernels()[0](*(tensor[:2, :, :rows] for tensor in trial), 0.0, True, scale=1.0)
            for rows in (TILE, *range(ROWS, TILE, ROWS))
        )
        for out, lse in parts:
            if not (same(out, whole[0][:, :, : out.shape[2]]) and same(lse, whole[1][:, :, : out.shape[2]])):
                return False
    return True


def width_of(spec: AttentionSpec) -> int:
    """Returns the channels of the heads that the kernel computes for a call with ``invariant``."""
    import torch

    shape = Shape(spec.dtype, spec.num_heads, spec.num_kv_heads, spec.head_dim, torch.get_num_threads())
    return spec.head_dim if keeps_heads(shape) else -(-spec.head_dim // WIDTHS) * WIDTHS


def in_wider_heads(spec: AttentionSpec, inputs: Inputs) -> tuple[AttentionSpec, Inputs] | None:
    """Returns a call with heads that are filled up; None if they need not be."""
    width = width_of(spec)
    if width == spec.head_dim:
        return None
    q, k, v = (_filled_heads(tensor, width) for tensor in inputs[:3])
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    return replace(spec, head_dim=width, value_dim=width, scale=scale), inputs._replace(q=q, k=k, v=v)


def gradients_of_wider_heads(
    backward: Callable[..., Gradients], spec: AttentionSpec, wider: tuple[AttentionSpec, Inputs], results: Any
) -> Gradients:
    """Returns the gradients of a call from the backward of ``in_wider_heads``.

    Args:
        results: (out, lse, dout, dlse).
    """
    out, lse, dout, dlse = results
    out, dout = (_filled_heads(each, wider[0].head_dim) for each in (out, dout))
    gradients = backward(*wider, out, lse, dout, dlse)
    return Gradients(*(gradient[..., : spec.head_dim].contiguous() for gradient in gradients[:3]))


def _filled_heads(tensor: Any, width: int) -> Any:
    """Returns a tensor ``[..., dim]`` with 0 behind its channels."""
    import torch

    return torch.nn.functional.pad(tensor.detach(), (0, width - tensor.shape[-1]))


def _keeps_rows(shape: Shape, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
    for trial in trials(shape):
        for number, length in product(queries, keys):
            rows = (
                _operand(trial.q, number, shape.num_heads),
                _operand(trial.k, length, shape.num_kv_heads),
                _operand(trial.v, length, shape.num_kv_heads),
            )
            if not same_in_a_batch(shape, _results, rows):
                return False
    return True


def _operand(tensor: Any, tokens: int, heads: int) -> Any:
    """Returns the first tokens of ``[batch, some heads, tokens, dim]`` as a call has them, among rows of all heads."""
    whole = tensor.new_zeros(tensor.shape[0], tokens, heads, tensor.shape[3])
    some = whole[:, :, : tensor.shape[1]]
    some.copy_(tensor[:, :, :tokens].transpose(1, 2))
    return some.transpose(1, 2)


def rows_of_group(shape: Shape) -> int:
    """Returns how many rows a call has in which the query heads of a group are rows of one head."""
    return shape.group if keeps_few_queries(shape) else -(-shape.group // ROWS) * ROWS


def _results(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Returns out, lse, dq, dk and dv; dout is q."""
    forward, backward = kernels()
    out, lse = forward(q, k, v, 0.0, False, scale=1.0)
    return out, lse, *backward(q, q, k, v, out, lse, 0.0, False, scale=1.0)


def _filled(op: Callable[..., tuple[Any, ...]], operands: int) -> Callable[..., tuple[Any, ...]]:
    """Returns an op that computes at least ROWS queries, and returns those that it was given."""
    import torch

    def run(*arguments: Any, attn_mask: Any = None, **options: Any) -> tuple[Any, ...]:
        queries = arguments[0].shape[2]
        if queries >= ROWS:
            return op(*arguments, attn_mask=attn_mask, **options)
        more, filled = ROWS - queries, list(arguments)
        for at in OF_QUERIES[operands]:
            tensor = arguments[at]
            if tensor.dim() == 3:  # lse
                filled[at] = torch.nn.functional.pad(tensor, (0, more))
            else:  # [batch, heads, queries, dim], as a view of [batch, queries, heads, dim]
                filled[at] = torch.nn.functional.pad(tensor.transpose(1, 2), (0, 0, 0, 0, 0, more)).transpose(1, 2)
        if attn_mask is not None and attn_mask.shape[2] > 1:
            attn_mask = torch.nn.functional.pad(attn_mask, (0, 0, 0, more))
        first, *others = op(*filled, attn_mask=attn_mask, **options)
        first = first.transpose(1, 2)[:, :queries].contiguous().transpose(1, 2)  # out or dq
        return (first, others[0][:, :, :queries]) if operands == FORWARD else (first, *others)

    return run


def _twice(op: Any, operands: int) -> Any:
    """Returns an op whose first operands, ``[1, heads, seq, ...]``, are computed as two rows of a batch.

    The rows are in the layout of a batch, because the library behind torch multiplies rows at other strides otherwise.
    """
    import torch

    def run(*arguments: Any, attn_mask: Any = None, **options: Any) -> tuple[Any, ...]:
        if arguments[0].shape[0] > 1:  # several blocks of a window
            return op(*arguments, attn_mask=attn_mask, **options)  # type: ignore[no-any-return]
        doubled = [torch.cat([tensor.transpose(1, 2)] * 2).transpose(1, 2) for tensor in arguments[:operands]]
        results = op(*doubled, *arguments[operands:], attn_mask=attn_mask, **options)
        return tuple(result[:1] for result in results)

    return run
