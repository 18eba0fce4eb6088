"""Prepares the tensors of a compiled FlexAttention call other than q, k, v: scalars, tables, block tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attn_core.backends.flex.blocks import (
    BLOCK,
    BlockMatrices,
    Table,
    blocks,
    dense_intervals,
    function_blocks,
    mask_blocks,
    packed_intervals,
    range_blocks,
    table,
    tables_of_blocks,
    widths,
)
from attn_core.backends.flex.functions import Edges, PackedTokens, Softcap, edges, places
from attn_core.backends.flex.program import program, refuse_capture
from attn_core.backends.shared.readable import copied
from attn_core.call.functions import aux_of, reads
from attn_core.call.masks import band
from attn_core.call.observe import bias_copied
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs
from attn_core.expressions.on_torch import torch_function
from attn_core.expressions.properties import uses

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Result = TypeVar("Result")
Prepared = tuple[PackedTokens | None, tuple[Table, Table]]
"""(places, tables), see FlexOperands."""


class FlexOperands(NamedTuple):
    """The tensors behind the score and mask functions; each is None if the call has none.

    edges: int32 scalars; places: of packed tokens; tables: of the rows and of the keys; mask, bias
    ``[batch, heads, q_len, kv_len]``, any axis may be 1; slopes ``[heads]`` or ``[batch, heads]``; softcap, with the
    scale in it; ranges: of key ranges the starts and the stops, int32 ``[batch or 1, kv_heads or 1, 1, kv_len]`` each;
    aux: the arrays of the call's functions; learned: those of a backward that gives them gradients, see ``learned.py``.
    """

    edges: Edges | None
    places: PackedTokens | None
    tables: tuple[Table, Table] | None
    mask: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    softcap: Softcap | None
    ranges: tuple[Tensor, ...] | None
    aux: tuple[Tensor, ...] = ()
    learned: tuple[Tensor, ...] = ()


def operands(spec: AttentionSpec, inputs: Inputs) -> FlexOperands:
    """Returns the operands of a call, on its device and current stream, without a synchronisation."""
    mask, bias, slopes = (None if t is None else t.detach() for t in (inputs.mask, inputs.bias, inputs.alibi_slopes))
    mask, bias = _condensed(mask), _condensed(bias)
    hidden, cap, ranges = hides(spec), _softcap(spec, inputs.q.device), _range_ends(inputs.key_ranges)
    aux, in_each_call = tuple(array.detach() for array in aux_of(inputs)), by_tensors(spec)
    if not (hidden or in_each_call or spec.mask_mod is not None or slopes is not None):
        return FlexOperands(None, None, None, mask, bias, slopes, cap, None, aux)
    edge, tables = _constants(spec, inputs.q.device)
    where = None
    if in_each_call:
        where, tables = run_prepare(spec, edge, offsets(inputs), mask, ranges, aux)
    return FlexOperands(edge, where, tables, mask, bias, slopes, cap, ranges, aux)


def _range_ends(key_ranges: Tensor | None) -> tuple[Tensor, ...] | None:
    """Returns the starts and stops of key ranges, one contiguous tensor each, so that a kernel reads them in order."""
    if key_ranges is None:
        return None
    ends = key_ranges.detach().flatten(3).unbind(3)  # [batch or 1, kv_heads or 1, kv_len] each
    return tuple([end.contiguous()[:, :, None] for end in ends])


def _condensed(values: Tensor | None) -> Tensor | None:
    """Returns a contiguous tensor in which expanded axes have length 1 again."""
    if values is None or values.is_contiguous():
        return values
    for axis, stride in enumerate(values.stride()):
        values = values.narrow(axis, 0, 1) if stride == 0 else values
    if values.is_floating_point() and not values.is_contiguous():
        bias_copied()
    return values.contiguous()


def offsets(inputs: Inputs) -> tuple[Tensor | None, Tensor | None]:
    """Returns cu_seqlens_q and cu_seqlens_k as two tensor objects.

    The caller may pass one object twice; a program traced with one object would not accept two.
    """
    if inputs.cu_seqlens_q is None:
        return None, None
    return inputs.cu_seqlens_q.detach(), inputs.cu_seqlens_k.detach()


def _constants(spec: AttentionSpec, device: torch.device) -> tuple[Edges, tuple[Table, Table] | None]:
    """Returns the (edges, tables) that depend on the spec alone. The tables are None if they depend on tensors."""
    with_tables = (hides(spec) or spec.mask_mod is not None) and not by_tensors(spec)
    rows = () if spec.mask_mod is None else (spec.batch, spec.num_heads, spec.mask_mod)
    sizes = (spec.q_len, spec.kv_len, *widths(spec), *rows) if with_tables else None
    by_stream = _by_stream(edges(spec), sizes, device)
    return _on_stream(by_stream, device, lambda: _new_constants(spec, device, with_tables))


def _softcap(spec: AttentionSpec, device: torch.device) -> Softcap | None:
    """Returns the softcap of a spec; one program serves all caps and, with a cap, all scales."""
    if spec.softcap is None:
        return None
    most = 3.4028234663852886e38  # of float32: inf * 0 would be NaN
    numbers = min((spec.scale or 1.0) / spec.softcap, most), min(spec.softcap, most)  # the scale is never None
    by_stream = _by_stream(numbers, None, device)
    return _on_stream(by_stream, device, lambda: _new_softcap(numbers, device))


def _on_stream(by_stream: dict[int, Result], device: torch.device, make: Callable[[], Result]) -> Result:
    """Returns the tensors of the current stream, made if it has none.

    Cached per stream, because another stream could read them before the first stream has written them. A capturing
    stream takes those of any stream, because a capture begins after a device synchronisation.
    """
    import torch

    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    if stream not in by_stream:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if by_stream and capturing:
            by_stream[stream] = next(iter(by_stream.values()))
        else:
            refuse_capture("the block tables or the softcap of this call do not exist yet")
            with torch.inference_mode(False):  # autograd could not save inference tensors later
                by_stream[stream] = make()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The graph has only their addresses: they must outlive it. By id, so that a second graph adds nothing.
        _in_graphs[id(by_stream[stream])] = by_stream[stream]
    return by_stream[stream]


_in_graphs: dict[int, Any] = {}
"""Tensors captured by CUDA graphs. Never freed: torch does not report when a graph is destroyed."""


@lru_cache(maxsize=64)
def _by_stream(
    numbers: tuple[float, ...], lengths: tuple[Hashable, ...] | None, device: torch.device
) -> dict[int, Any]:
    """Returns the dict that caches tensors made from numbers, by stream."""
    return {}


def _new_constants(
    spec: AttentionSpec, device: torch.device, with_tables: bool
) -> tuple[Edges, tuple[Table, Table] | None]:
    """Returns the numbers of a band as tensors; ``with_tables`` also the block tables of rows and of keys."""
    import torch

    edge = edges(spec)
    scalars = Edges(*(torch.full((), value, dtype=torch.int32, device=device) for value in edge))
    if not with_tables:
        return scalars, None
    if spec.mask_mod is not None:
        return scalars, run_prepare(spec, scalars, (None, None), None, None, ())[1]
    rows, keys = dense_intervals(edge, spec.q_len, spec.kv_len, device)
    return scalars, (table(rows, spec.kv_len, widths(spec)[0]), table(keys, spec.q_len, widths(spec)[1]))


def _new_softcap(numbers: tuple[float, float], device: torch.device) -> Softcap:
    import torch

    return Softcap(*(torch.full((), number, dtype=torch.float32, device=device) for number in numbers))


def arrange(tensor: Tensor) -> tuple[Tensor, int | str]:
    """Returns a ``[batch, tokens, heads, dim]`` tensor in a layout that programs are compiled for, and the layout.

    The layout is "tokens" or "heads" (the outermost axis in a batch row), or the stride of tokens with gaps between
    them. A tensor in another layout is copied.
    """
    if tensor.is_contiguous():
        return tensor, "tokens"
    if tensor.transpose(1, 2).is_contiguous():
        return tensor, "heads"
    batch, length, _, dim = tensor.shape
    step = tensor.stride(1)
    dense = tensor.stride(3) == 1 and tensor.stride(2) == dim and step % 8 == 0
    if dense and length > 1 and (batch == 1 or tensor.stride(0) == length * step):
        return tensor, step
    return copied(tensor), "tokens"


# The block tables of a call whose visibility depends on tensors, by compiled programs.


def hides(spec: AttentionSpec) -> bool:
    """Returns whether causal or window hide any key. True for packed documents, whose lengths are not known here."""
    edge = band(spec)
    banded = edge.left is not None or edge.right is not None
    return banded and (spec.packed or not edge.hides_nothing(spec.q_len, spec.kv_len))


@lru_cache(maxsize=4096)
def length_classes(spec: AttentionSpec) -> tuple[bool, ...]:
    """Length properties that force a separate compilation: size 1, shorter than one block, multiple of the block.

    torch's compiler never makes a symbol of a size of 1; the other two select different code.
    """
    tokens = (spec.q_len, spec.kv_len)
    sizes = (spec.batch, *tokens, *map(blocks, tokens), spec.documents, *widths(spec))
    return (*(size == 1 for size in sizes), spec.q_len < BLOCK, *(length % BLOCK == 0 for length in tokens))


def by_tensors(spec: AttentionSpec) -> bool:
    """Returns whether the block tables depend on tensors: offsets, a mask, ranges, or arrays of the mask function."""
    tables = spec.packed or spec.mask_shape is not None or spec.key_ranges_shape is not None
    return tables or (spec.mask_mod is not None and "aux" in uses(spec.mask_mod))


def run_prepare(
    spec: AttentionSpec,
    edge: Edges,
    cu_seqlens: tuple[Tensor | None, Tensor | None],
    mask: Tensor | None,
    ranges: tuple[Tensor, ...] | None,
    aux: tuple[Tensor, ...],
) -> Prepared:
    """Runs ``_prepare`` as a compiled program, after one for the mask function.

    In one program Triton 3.6 fails to compile some functions ("operand #0 does not dominate this use"), because the
    function and the sort of the table become one kernel.
    """
    sizes = spec.q_len, spec.kv_len
    shown = None if spec.mask_mod is None else _run_function(spec, edge, aux)
    tensors = [t for t in (mask, *(ranges or ()), *(shown or ())) if t is not None]
    group = ("head",) * spec.group_size if ranges is not None else ()  # a number would become a symbol
    how = (spec.packed, hides(spec), spec.alignment, group, shown is None, mask is None, _broadcast(tensors))
    run = program(_prepare, *how, length_classes(spec))
    return run(edge, *cu_seqlens, mask, ranges, shown, *sizes)


def _run_function(spec: AttentionSpec, edge: Edges, aux: tuple[Tensor, ...]) -> BlockMatrices:
    """Returns the blocks of the call's mask function, by one compiled program."""
    by_batch, by_head = reads(spec, "b"), reads(spec, "h")
    how = (torch_function(spec.mask_mod), by_batch, by_head, _broadcast(aux))
    run = program(_function_blocks, *how, tuple(str(t.dtype) for t in aux), length_classes(spec))
    return run(edge, aux, spec.batch, spec.num_heads, spec.q_len, spec.kv_len)


def _function_blocks(
    how: tuple[Any, ...], edge: Edges, aux: tuple[Tensor, ...], batch: int, heads: int, q_len: int, kv_len: int
) -> BlockMatrices:
    of_rows, by_batch, by_head, *_ = how
    rows = batch if by_batch else 1, heads if by_head else 1
    return function_blocks(of_rows.function, aux, rows, q_len, kv_len, edge)


def _broadcast(tensors: Sequence[Tensor]) -> tuple[tuple[bool, ...], ...]:
    """Returns which axes of each tensor have length 1: torch's compiler never makes a symbol of such a size."""
    return tuple([tuple([length == 1 for length in t.shape]) for t in tensors])


def _prepare(
    how: tuple[Any, ...],
    edge: Edges,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    mask: Tensor | None,
    ranges: tuple[Tensor, ...] | None,
    shown: BlockMatrices | None,
    q_len: int,
    kv_len: int,
) -> Prepared:
    """Returns (places, tables) of a call whose visibility depends on tensors. Runs compiled.

    Args:
        shown: the blocks of the mask function, or None.
    """
    packed, hidden, alignment, group, *_ = how
    where = places(cu_q, cu_k, q_len, kv_len, alignment == "bottom_right") if packed else None  # type: ignore[arg-type]
    seen = None
    if where is not None:
        seen = packed_intervals(edge, where, cu_q, cu_k, alignment == "bottom_right")  # type: ignore[arg-type]
    elif hidden:
        seen = dense_intervals(edge, q_len, kv_len, edge.left.device)
    if mask is None and ranges is None and shown is None and seen is not None:
        return where, (table(seen[0], kv_len, blocks(kv_len)), table(seen[1], q_len, blocks(q_len)))
    parts = [] if mask is None else [mask_blocks(mask)]
    parts += [] if ranges is None else [range_blocks(ranges, q_len, kv_len, len(group))]
    parts += [] if shown is None else [shown]
    return where, tables_of_blocks(parts, None if seen is None else seen[0], q_len, kv_len)
