"""What torch's CPU flash kernel gets: heads of a group as queries of one head, additive masks, and blocks of queries.

The kernel reads a key once for each query head. If each row has one query, the heads of a group differ in nothing else,
so they can share one reading of the keys.

In bfloat16, torch multiplies a single row by a matrix with a loop that takes several times as long as its product of
two rows. So a query that has no other head in its group is computed twice. A processor with tiles (Intel AMX) is the
other way round: torch multiplies a few rows in tiles, which must be filled first, and a single row without them.

Bias, ALiBi, mask and band are one additive tensor. Tables of a band are pure functions of a few numbers, so small ones
are cached. The kernel broadcasts axes of 1.

It hides keys only by such a mask. One of all queries and keys would cost memory and time for every pair, also for
hidden ones. So each block of queries is a call of its own, on the keys that its band reaches and with a mask of that
size. Neighbouring blocks of a window have the same mask and equally large views of the keys, so several of them are the
batch of one call: many small calls lose more time between calls than in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.shared import aten_masks
from attn_core.call.masks import Band, band
from attn_core.call.observe import bias_copied, mask_converted
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs, part_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._ops import OpOverload

GROUP_FOR_TILES = 4
"""Query heads of a group from which tiles multiply the group as fast as its heads one by one."""


@cache
def has_tiles() -> bool:
    """Returns whether torch multiplies bfloat16 in tiles on this processor."""
    import torch

    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)  # a private name, which a version may lack
    return bool(supported is not None and supported())


@cache
def kernels() -> tuple[Callable[..., tuple[Tensor, Tensor]], OpOverload]:
    """Returns the forward and the backward op, on ``[batch, heads, seq, dim]``."""
    import torch

    backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    return torch._scaled_dot_product_flash_attention_for_cpu, backward_op


@lru_cache(maxsize=4096)
def forward_op(spec: AttentionSpec, is_causal: bool = False) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the forward of a dense call: ``(q, k, v, attn_mask=None) -> (out, lse)``; attn_mask is an additive mask.

    Tensors are ``[batch, heads, seq, dim]``.
    """
    tiles = spec.dtype == "bfloat16" and has_tiles()
    alone = spec.group_size == 1 and spec.dtype == "bfloat16" and not tiles
    # A training call stays as it is: torch saves the kernel's own tensors for the backward.
    plain = spec.q_len != 1 or spec.needs_backward or is_causal
    if not plain and spec.group_size > 1 and not (tiles and spec.group_size < GROUP_FOR_TILES):
        return _by_group(spec)
    op = run_twice if alone and not plain else kernels()[0]
    return partial(op, dropout_p=0.0, is_causal=is_causal, scale=spec.scale)  # no frame of Python


def _by_group(spec: AttentionSpec) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the forward of one query per row that hands a group's heads to the kernel as rows of one head.

    So the kernel reads each key once instead of once for each head of the group.
    """
    kernel, scale, heads = kernels()[0], spec.scale, (spec.num_kv_heads, spec.group_size)

    def run(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        batch, all_heads, _, dim = q.shape
        if attn_mask is not None and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.reshape(attn_mask.shape[0], *heads, attn_mask.shape[3])
        # [batch, heads, 1, dim] -> [batch, kv_heads, group, dim] and back
        out, lse = kernel(q.reshape(batch, *heads, dim), k, v, 0.0, False, attn_mask=attn_mask, scale=scale)
        return out.reshape(batch, all_heads, 1, dim), lse.reshape(batch, all_heads, 1)

    return run


def run_twice(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, **options: object
) -> tuple[Tensor, Tensor]:
    """Returns the forward op's results for one query in each row, which it computes twice. Arguments as the op's."""
    # [batch, heads, 1, dim] -> [batch, heads, 2, dim]; the kernel cannot read a query axis of stride 0
    out, lse = kernels()[0](q.repeat(1, 1, 2, 1), k, v, dropout_p, is_causal, **options)
    return out[:, :, :1], lse[:, :, :1]


CACHED_ELEMENTS = 2**14
"""The most elements of a cached table: with BANDS entries in each cache, at most 16 MiB."""
BANDS = 64
Result = TypeVar("Result")


def additive(
    dtype: str,
    device: torch.device,
    mask: Tensor | None,
    bias: Tensor | None,
    edge: Band | None,
    rows: slice,
    keys: slice,
) -> Tensor | None:
    """Returns bias, mask and band as one additive tensor of ``dtype``, or None if there are none.

    Args:
        mask, bias: ``[batch or 1, heads or 1, rows or 1, keys or 1]``, those of these rows and keys, or None.
        edge: the band, which counts rows and keys of the whole call, or None.

    Returns:
        ``[batch or 1, heads or 1, rows or 1, keys or 1]``, -inf where hidden.
    """
    import torch

    if bias is not None and bias.dtype is not getattr(torch, dtype):
        if rows.start == 0:  # once for all blocks of a call
            bias_copied()
        bias = bias.to(getattr(torch, dtype))
    if mask is not None and (bias is not None or aten_masks.KEPT_MARK not in mask.__dict__):
        mask_converted()
    if edge is None and mask is None:
        return bias
    zero, hides = _constants(dtype, device)
    if edge is None:
        if bias is None and aten_masks.KEPT_MARK in mask.__dict__:
            return aten_masks.kept_additive(mask, (dtype,), lambda: torch.where(mask, zero, hides))  # type: ignore[arg-type]
        return torch.where(mask, zero if bias is None else bias, hides)  # type: ignore[arg-type]
    inside, added = _band(dtype, device, edge, rows, keys)
    if bias is None:
        if mask is None or aten_masks.KEPT_MARK not in mask.__dict__:
            return added if mask is None else torch.where(mask, added, hides)
        form = dtype, edge, rows.start, rows.stop, keys.start, keys.stop
        return aten_masks.kept_additive(mask, form, lambda: torch.where(mask, added, hides))
    return torch.where(inside if mask is None else inside & mask, bias, hides)


def with_alibi(dtype: str, added: Tensor | None, slopes: Tensor, offset: int, rows: slice, keys: slice) -> Tensor:
    """Adds ``-slope * |i + offset - j|`` to an additive mask, or to nothing if it is None.

    Args:
        slopes: ``[heads]`` or ``[batch, heads]``.

    Returns:
        ``[batch or 1, heads, rows, keys]``.
    """
    import torch

    slopes = slopes.to(getattr(torch, dtype)).reshape(-1, slopes.shape[-1], 1, 1)
    distance = _table(_cached_distance, _new_distance, dtype, slopes.device, offset, rows, keys)
    return slopes * distance if added is None else torch.addcmul(added, slopes, distance)


def empty_rows(added: Tensor) -> Tensor:
    """Returns which rows of an additive mask see no key: bool ``[batch or 1, heads or 1, rows or 1]``."""
    import torch

    return added.amax(dim=-1) == -torch.inf


def _constants(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns 0 and -inf as tensors without axes, because torch converts numbers to such tensors on every call."""
    return _cached_constants(dtype, device) if aten_masks.makes_plain_tensors() else _new_constants(dtype, device)


def _band(dtype: str, device: torch.device, edge: Band, rows: slice, keys: slice) -> tuple[Tensor, Tensor]:
    """Returns which keys a band shows, bool ``[1, 1, rows, keys]``, and the same as an additive mask."""
    return _table(_cached_band, _new_band, dtype, device, edge, rows, keys)


def _table(
    cached: Callable[..., Result],
    new: Callable[..., Result],
    dtype: str,
    device: torch.device,
    what: Band | int,
    rows: slice,
    keys: slice,
) -> Result:
    """Returns a table of rows and keys, from the cache if it is small."""
    place = (rows.start, rows.stop, keys.start, keys.stop)
    small = (rows.stop - rows.start) * (keys.stop - keys.start) <= CACHED_ELEMENTS
    return (cached if small and aten_masks.makes_plain_tensors() else new)(dtype, device, what, place)


def _new_constants(dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    import torch

    kind = getattr(torch, dtype)
    with torch.inference_mode(False):  # a later training call saves the cached tensors, so they are no inference ones
        return torch.tensor(0.0, dtype=kind, device=device), torch.tensor(-torch.inf, dtype=kind, device=device)


def _new_band(dtype: str, device: torch.device, edge: Band, place: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None]
        inside = edge.contains(queries, torch.arange(place[2], place[3], device=device))[None, None]
        return inside, torch.where(inside, *_constants(dtype, device))


def _new_distance(dtype: str, device: torch.device, offset: int, place: tuple[int, int, int, int]) -> Tensor:
    """Returns ``-|i + offset - j|``, ``[1, 1, rows, keys]``."""
    import torch

    with torch.inference_mode(False):
        queries = torch.arange(place[0], place[1], device=device)[:, None] + offset
        distance = (queries - torch.arange(place[2], place[3], device=device)).abs().neg()
        return distance.to(getattr(torch, dtype))[None, None]


_cached_constants = lru_cache(maxsize=BANDS)(_new_constants)
_cached_band = lru_cache(maxsize=BANDS)(_new_band)
_cached_distance = lru_cache(maxsize=BANDS)(_new_distance)


WINDOW_ROWS = 128
"""The most queries of a block with a window. More would read many keys that most of them do not see."""
MASK_ELEMENTS = 2**22
"""The most elements of a block's mask, 16 MiB in float32; but a block always has FEWEST_ROWS queries."""
FEWEST_ROWS = 32
"""The fewest queries of a block. Fewer would read all keys for very little work."""


class QueryBlock(NamedTuple):
    """Some queries and the keys that any of them may see.

    edge: the band if it hides some of these keys from some of these queries, else None.
    whole: whether the block has all queries and all keys.
    """

    rows: slice
    keys: slice
    edge: Band | None
    whole: bool


class Stack(NamedTuple):
    """Some neighbouring blocks with the same mask: the first, and how many there are."""

    block: QueryBlock
    number: int

    @property
    def rows(self) -> slice:
        """The queries of all blocks."""
        start, stop = self.block.rows.start, self.block.rows.stop
        return slice(start, start + (stop - start) * self.number)

    def view(self, tensor: Tensor, row: int, tokens: slice) -> Tensor:
        """Returns ``[number, heads, tokens, ...]``: a batch row of each block's part, ``tokens`` being the first's.

        Args:
            tensor: ``[batch, heads, seq, dim]`` or ``[batch, heads, seq]``.
        """
        first = tensor[row, :, tokens]
        step = (self.block.rows.stop - self.block.rows.start) * first.stride(1)
        return first.as_strided((self.number, *first.shape), (step, *first.stride()), first.storage_offset())


@lru_cache(maxsize=128)  # the blocks of 65536 queries with a window take 330 KiB
def blocks(spec: AttentionSpec) -> tuple[QueryBlock, ...]:
    """Returns the blocks of a dense call in order. Rows in no block see no key."""
    edge, step = band(spec), _height(spec)
    result = []
    for start in range(0, spec.q_len, step):
        stop = min(start + step, spec.q_len)
        first, last = edge.keys_of(start, stop - 1, spec.kv_len)
        if first < last:
            corners = (start, last - 1), (stop - 1, first)  # the pairs with the largest distance right and left
            cut = not all(edge.contains(*corner) for corner in corners)
            whole = (start, stop, first, last) == (0, spec.q_len, 0, spec.kv_len)
            result.append(QueryBlock(slice(start, stop), slice(first, last), edge if cut else None, whole))
    return tuple(result)


def _height(spec: AttentionSpec) -> int:
    """Returns the number of queries of a block."""
    slopes = (1, *spec.alibi_shape)[-2:] if spec.alibi_shape else None  # (batch or 1, heads)
    tables = [shape for shape in (spec.mask_shape, spec.bias_shape, slopes) if shape]
    copies = max((shape[0] for shape in tables), default=1) * max((shape[1] for shape in tables), default=1)
    rows = max(FEWEST_ROWS, MASK_ELEMENTS // max(1, copies * spec.kv_len))
    one_sided = band(spec)._replace(right=None).hides_nothing(spec.q_len, spec.kv_len)
    return rows if one_sided else min(rows, WINDOW_ROWS)


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a dense call whose q, k and v the kernel can read.

    The keys that the blocks of a stack see move on with their queries. So one view with one stride has all blocks of a
    stack, one document each of the kernel's batch; ``stack.block`` is the first, ``stack.rows`` are the rows of all.
    """
    out: Any = None
    lse: Any = None
    q, k, v = (tensor.transpose(1, 2) for tensor in inputs[:3])  # [batch, heads, seq, dim], as views
    for stack, mask in _with_masks(spec, inputs):
        rows, keys, _, whole = stack.block
        if stack.number > 1:
            if out is None:
                out, lse = _empty_results(spec, inputs.q)
            for row in range(spec.batch):
                views = stack.view(q, row, rows), stack.view(k, row, keys), stack.view(v, row, keys)
                part, part_lse = _run(spec, views, mask)
                # [number, heads, rows, dim] -> [queries, heads, dim]; [number, heads, rows] -> [heads, queries]
                out[row, stack.rows] = part.transpose(1, 2).flatten(0, 1)
                lse[row, :, stack.rows] = part_lse.transpose(0, 1).flatten(1)
            continue
        tensors = (q, k, v) if whole else (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        part, part_lse = _run(spec, tensors, mask)
        if whole:
            return part.transpose(1, 2), part_lse
        if out is None:
            out, lse = _empty_results(spec, inputs.q)
        out[:, rows], lse[:, :, rows] = part.transpose(1, 2), part_lse
    return _empty_results(spec, inputs.q) if out is None else (out, lse)


def _run(spec: AttentionSpec, tensors: tuple[Tensor, Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Runs the kernel and corrects its log-sum-exp, which is 0 for a row that sees no key."""
    if spec.q_len == 1:  # else not: the lookup of an op hashes the spec on every call
        part, lse = forward_op(spec)(*tensors, attn_mask=mask)
    else:
        part, lse = kernels()[0](*tensors, 0.0, False, attn_mask=mask, scale=spec.scale)
    return part, lse if mask is None else lse.masked_fill(empty_rows(mask), -float("inf"))


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (dq, dk, dv) of a dense call whose q, k, v and dout the kernel can read."""
    lse = lse.masked_fill(lse == -float("inf"), 0.0)  # the kernel's own value for a row that sees no key
    q, k, v, out, dout = (tensor.transpose(1, 2) for tensor in (*inputs[:3], out, dout))
    sums: Any = None
    for stack, mask in _with_masks(spec, inputs):
        rows, keys, _, whole = stack.block
        tensors: tuple[Tensor, ...] = (dout, q, k, v, out, lse)
        if stack.number > 1:
            sums = sums or _zeros(spec, inputs)
            for row in range(spec.batch):
                views = [stack.view(t, row, at) for t, at in zip(tensors, (rows, rows, keys, keys, rows, rows))]
                parts = kernels()[1](*views, 0.0, False, attn_mask=mask, scale=spec.scale)
                sums[0][row, :, stack.rows] += parts[0].transpose(0, 1).flatten(1, 2)
                for index in range(stack.number):  # their keys overlap
                    begin = keys.start + index * (rows.stop - rows.start)
                    for total, part in zip(sums[1:], parts[1:], strict=True):
                        total[row, :, begin : begin + keys.stop - keys.start] += part[index]
            continue
        if not whole:
            tensors = tuple(t[:, :, at] for t, at in zip(tensors, (rows, rows, keys, keys, rows, rows)))
        parts = kernels()[1](*tensors, 0.0, False, attn_mask=mask, scale=spec.scale)
        if whole:
            sums = parts
            break
        sums = sums or _zeros(spec, inputs)
        # Blocks share keys, so their dk and dv are summed, in float32; see ``_zeros``.
        for total, part, places in zip(sums, parts, (rows, keys, keys), strict=True):
            total[:, :, places] += part
    dq, dk, dv = (total.transpose(1, 2).to(q.dtype) for total in sums or _zeros(spec, inputs))
    return dq, dk, dv


def _empty_results(spec: AttentionSpec, q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of rows that see no key: 0 and -inf."""
    import torch

    return q.new_zeros(spec.out_shape), q.new_full(spec.lse_shape, -torch.inf, dtype=getattr(torch, spec.lse_dtype))


def _zeros(spec: AttentionSpec, inputs: Inputs) -> list[Tensor]:
    """Returns zeros shaped like q, k and v in float32 (float64 for float64), as ``[batch, heads, seq, dim]`` views."""
    import torch

    dtype = getattr(torch, spec.lse_dtype)
    return [tensor.new_zeros(tensor.shape, dtype=dtype).transpose(1, 2) for tensor in inputs[:3]]


def _stacks(spec: AttentionSpec) -> list[Stack]:
    """Returns the blocks in order, those with equal distances in stacks if they share all of the mask."""
    every = blocks(spec)
    if len(every) == 1 or spec.mask_shape is not None or spec.bias_shape is not None:
        return [Stack(block, 1) for block in every]
    slopes_of_rows = spec.alibi_shape is not None and len(spec.alibi_shape) == 2
    result: list[Stack] = []
    for block in every:
        if result and not slopes_of_rows:
            first, number = result[-1]
            # The kernel may copy the keys of each block, so a call reads at most twice as many as there are.
            most = 2 * spec.kv_len // (first.keys.stop - first.keys.start)
            if spec.batch < most and number < most and _distances(first) == _distances(block):
                result[-1] = Stack(first, number + 1)
                continue
        result.append(Stack(block, 1))
    return result


def _distances(block: QueryBlock) -> tuple[int, int, int]:
    """Returns the height of a block, and how far its first and its last key are from its first query."""
    rows, keys = block.rows, block.keys
    return rows.stop - rows.start, keys.start - rows.start, keys.stop - rows.start


def _with_masks(spec: AttentionSpec, inputs: Inputs) -> Iterator[tuple[Stack, Tensor | None]]:
    """Yields each stack with its additive mask (see ``additive``), None if it hides nothing."""
    mask, built = None, None
    explicit = inputs.mask is not None or inputs.bias is not None
    for stack in _stacks(spec):
        rows, keys, edge, whole = block = stack.block
        # A band's mask depends only on distances, so blocks with equal distances share it.
        distances = _distances(block)
        if explicit or distances != built:
            table, bias = inputs.mask, inputs.bias
            if not whole:
                table, bias = part_of(table, rows, keys), part_of(bias, rows, keys)
            mask, built = additive(spec.lse_dtype, inputs.q.device, table, bias, edge, rows, keys), distances
            if inputs.alibi_slopes is not None:
                offset = (edge or band(spec)).offset
                mask = with_alibi(spec.lse_dtype, mask, inputs.alibi_slopes, offset, rows, keys)
        yield stack, mask
