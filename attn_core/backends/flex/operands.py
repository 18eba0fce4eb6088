"""What a compiled FlexAttention call takes besides q, k and v, and how poison in one packed document is kept there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from attn_core.backends.flex.blocks import (
    BLOCK,
    Table,
    blocks,
    dense_intervals,
    masked_tables,
    packed_intervals,
    table,
    widths,
)
from attn_core.backends.flex.functions import Edges, Places, edges, places
from attn_core.backends.flex.program import program, refuse_capture
from attn_core.backends.shared.cached_once import cached_once
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs


class Operands(NamedTuple):
    """The tensors behind the score and mask functions; each None where the call has none.

    edges: int32 scalars; places: of packed tokens; tables: of the rows and of the keys; mask, bias
    ``[batch, heads, q_len, kv_len]``, any of them 1; slopes ``[heads]`` or ``[batch, heads]``.
    """

    edges: Edges | None
    places: Places | None
    tables: tuple[Table, Table] | None
    mask: Any
    bias: Any
    slopes: Any


def hides(spec: AttentionSpec) -> bool:
    """Whether causal or window hide any key: of a whole row here, of some document perhaps."""
    edge = band(spec)
    banded = edge.left is not None or edge.right is not None
    return banded and (spec.packed or not edge.hides_nothing(spec.q_len, spec.kv_len))


@lru_cache(maxsize=4096)
def facts(spec: AttentionSpec) -> tuple[bool, ...]:
    """What of the lengths matters to a compiled program: 1 is never a symbol, short rows and whole blocks have code of
    their own."""
    tokens = (spec.q_len, spec.kv_len)
    sizes = (spec.batch, *tokens, *map(blocks, tokens), spec.documents, *widths(spec))
    return (*(size == 1 for size in sizes), spec.q_len < BLOCK, *(length % BLOCK == 0 for length in tokens))


def operands(spec: AttentionSpec, inputs: Inputs) -> Operands:
    """The operands of a call, on its device and ordered on its current stream; nothing is fetched from there."""
    mask, bias, slopes = (None if t is None else t.detach() for t in (inputs.mask, inputs.bias, inputs.alibi_slopes))
    mask, bias = _condensed(mask), _condensed(bias)
    hidden = hides(spec)
    if not (hidden or spec.packed or mask is not None or slopes is not None):
        return Operands(None, None, None, mask, bias, slopes)
    edge, tables = _constants(spec, inputs.q.device)
    where = None
    if spec.packed or mask is not None:
        shapes = None if mask is None else tuple(length == 1 for length in mask.shape)
        prepare = program(_prepared, spec.packed, hidden, spec.alignment, shapes, facts(spec))
        where, tables = prepare(edge, *_offsets(inputs), mask, spec.q_len, spec.kv_len)
    return Operands(edge, where, tables, mask, bias, slopes)


def _condensed(values: Any) -> Any:
    """A contiguous tensor without the axes that were only expanded; they are 1 again."""
    if values is None or values.is_contiguous():
        return values
    for axis, stride in enumerate(values.stride()):
        values = values.narrow(axis, 0, 1) if stride == 0 else values
    return values.contiguous()


def _offsets(inputs: Inputs) -> tuple[Any, Any]:
    """cu_seqlens_q and cu_seqlens_k as two tensors, even where they are one: a program that met one takes no other."""
    if inputs.cu_seqlens_q is None:
        return None, None
    return inputs.cu_seqlens_q.detach(), inputs.cu_seqlens_k.detach()


def _prepared(how: Any, edge: Edges, cu_q: Any, cu_k: Any, mask: Any, q_len: int, kv_len: int) -> Any:
    """(places, tables) of a call whose visibility depends on tensors; compiled."""
    packed, hidden, alignment, *_ = how
    where = places(cu_q, cu_k, q_len, kv_len, alignment == "bottom_right") if packed else None
    if where is not None:
        seen = packed_intervals(edge, where, cu_q, cu_k, alignment == "bottom_right")
    elif hidden:
        seen = dense_intervals(edge, q_len, kv_len, mask.device)
    else:
        return where, masked_tables(None, mask, q_len, kv_len)
    if mask is not None:
        return where, masked_tables(seen[0], mask, q_len, kv_len)
    return where, (table(seen[0], kv_len, blocks(kv_len)), table(seen[1], q_len, blocks(q_len)))


def _constants(spec: AttentionSpec, device: Any) -> tuple[Edges, tuple[Table, Table] | None]:
    """(edges, tables) that depend on the spec alone; the tables of a call that has others are None.

    Made once per stream: what one stream has queued, another may not have written yet. A captured stream takes those of
    any other, because a capture begins after the device was waited for.
    """
    import torch

    alone = hides(spec) and not spec.packed and spec.mask_shape is None
    kept = _kept(edges(spec), (spec.q_len, spec.kv_len, *widths(spec)) if alone else None, device)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    if stream not in kept:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if kept and capturing:
            kept[stream] = next(iter(kept.values()))
        else:
            refuse_capture("the block tables of this call do not exist yet")
            kept[stream] = _made(spec, device, alone)
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _in_graphs().append(kept[stream])  # the graph has only their addresses: they must outlive it
    return kept[stream]


@cached_once
def _in_graphs() -> list[Any]:
    """What CUDA graphs read in place, kept for as long as the process: nobody says when a graph is gone."""
    return []


@lru_cache(maxsize=64)
def _kept(edge: Edges, lengths: tuple[int, ...] | None, device: Any) -> dict[int, Any]:
    """By stream, what ``_constants`` has made."""
    return {}


def _made(spec: AttentionSpec, device: Any, with_tables: bool) -> tuple[Edges, tuple[Table, Table] | None]:
    import torch

    edge = edges(spec)
    scalars = Edges(*(torch.full((), value, dtype=torch.int32, device=device) for value in edge))
    if not with_tables:
        return scalars, None
    rows, keys = dense_intervals(edge, spec.q_len, spec.kv_len, device)
    return scalars, (table(rows, spec.kv_len, widths(spec)[0]), table(keys, spec.q_len, widths(spec)[1]))


def arranged(tensor: Any) -> tuple[Any, int | str]:
    """A ``[batch, tokens, heads, dim]`` tensor in a layout that a program can be compiled for, and which one: tokens or
    heads outermost in a batch row, or the stride of tokens with gaps between them. Copied only if it is none of these.
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
    return tensor.contiguous(), "tokens"


class Contained(NamedTuple):
    """Packed tensors without NaN and Inf, and who is to have NaN for it: bool ``[q tokens]`` and ``[k tokens]``."""

    tensors: tuple[Any, ...]
    rows: Any
    keys: Any


def contained(
    spec: AttentionSpec, where: Places, inputs: Inputs, by_query: tuple[Any, ...], by_key: tuple[Any, ...]
) -> Contained:
    """Takes what is not finite out of tensors ``[1, tokens, heads, dim]``, those of queries and those of keys.

    A query's own poison marks its row, a key's all rows of its document, and either all keys of its document.
    """
    given, layouts = zip(*map(arranged, (*by_query, *by_key)))
    shapes = tuple((str(tensor.dtype), tuple(tensor.shape[2:])) for tensor in given)
    clean = program(_contained, ("q",) * len(by_query), shapes, layouts, facts(spec))
    return clean(where, *_offsets(inputs), *given)


def _contained(how: Any, where: Places, cu_q: Any, cu_k: Any, *given: Any) -> Contained:
    import torch

    count = len(how[0])  # a number itself would become a symbol
    finite = [torch.isfinite(tensor) for tensor in given]
    clean = tuple(torch.where(fine, tensor, 0.0) for fine, tensor in zip(finite, given))
    bad = [~fine.all(3).all(2)[0] for fine in finite]  # [tokens]
    bad_rows, bad_keys = torch.zeros_like(where.of_query, dtype=torch.bool), bad[count]
    for one in bad[:count]:
        bad_rows = bad_rows | one
    for one in bad[count + 1 :]:
        bad_keys = bad_keys | one
    by_keys, by_rows = _in_documents(bad_keys, cu_k), _in_documents(bad_rows, cu_q)
    documents = cu_q.shape[0] - 1
    of_query, of_key = where.of_query.clamp(0, documents - 1), where.of_key.clamp(0, documents - 1)
    rows = bad_rows | (by_keys[of_query] & (where.of_query >= 0))
    keys = (by_keys | by_rows)[of_key] & (where.of_key < documents)
    return Contained(clean, rows, keys)


def _in_documents(bad: Any, cu_seqlens: Any) -> Any:
    """Which documents hold any of the bad tokens: bool ``[documents]``."""
    import torch

    total = torch.nn.functional.pad(bad.cumsum(0), (1, 0))
    return total[cu_seqlens.clamp(0, bad.shape[0])].diff() > 0


def marked(results: Any, tokens: Any, lse: Any = None) -> Any:
    """``[1, tokens, heads, dim]`` with NaN put in where ``tokens`` says, but not in rows that, by lse, see nothing."""
    import torch

    places = tokens[None, :, None, None]
    if lse is not None:  # [1, heads, tokens] -> [1, tokens, heads, 1]
        places = places & (lse != -torch.inf).transpose(1, 2)[..., None]
    return results.masked_fill_(places, torch.nan)
