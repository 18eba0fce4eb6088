"""The block tables of a compiled FlexAttention call whose visibility depends on tensors, by compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from attn_core.backends.flex.blocks import (
    BLOCK,
    BlockMatrices,
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
from attn_core.backends.flex.functions import Edges, places
from attn_core.backends.flex.program import program
from attn_core.call.functions import reads
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.expressions.on_torch import torch_function
from attn_core.expressions.properties import uses


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
    spec: AttentionSpec, edge: Edges, cu_seqlens: tuple[Any, Any], mask: Any, ranges: Any, aux: tuple[Any, ...]
) -> Any:
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


def _run_function(spec: AttentionSpec, edge: Edges, aux: tuple[Any, ...]) -> BlockMatrices:
    """Returns the blocks of the call's mask function, by one compiled program."""
    by_batch, by_head = reads(spec, "b"), reads(spec, "h")
    how = (torch_function(spec.mask_mod), by_batch, by_head, _broadcast(aux))  # type: ignore[arg-type]
    run = program(_function_blocks, *how, tuple(str(t.dtype) for t in aux), length_classes(spec))
    return run(edge, aux, spec.batch, spec.num_heads, spec.q_len, spec.kv_len)  # type: ignore[no-any-return]


def _function_blocks(how: Any, edge: Edges, aux: Any, batch: int, heads: int, q_len: int, kv_len: int) -> Any:
    of_rows, by_batch, by_head, *_ = how
    rows = batch if by_batch else 1, heads if by_head else 1
    return function_blocks(of_rows.function, aux, rows, q_len, kv_len, edge)


def _broadcast(tensors: Sequence[Any]) -> tuple[tuple[bool, ...], ...]:
    """Returns which axes of each tensor have length 1: torch's compiler never makes a symbol of such a size."""
    return tuple([tuple([length == 1 for length in t.shape]) for t in tensors])


def _prepare(
    how: Any, edge: Edges, cu_q: Any, cu_k: Any, mask: Any, ranges: Any, shown: Any, q_len: int, kv_len: int
) -> Any:
    """Returns (places, tables) of a call whose visibility depends on tensors. Runs compiled.

    Args:
        shown: the blocks of the mask function, or None.
    """
    packed, hidden, alignment, group, *_ = how
    where = places(cu_q, cu_k, q_len, kv_len, alignment == "bottom_right") if packed else None
    seen = None
    if where is not None:
        seen = packed_intervals(edge, where, cu_q, cu_k, alignment == "bottom_right")
    elif hidden:
        seen = dense_intervals(edge, q_len, kv_len, edge.left.device)
    if mask is None and ranges is None and shown is None and seen is not None:
        return where, (table(seen[0], kv_len, blocks(kv_len)), table(seen[1], q_len, blocks(q_len)))
    parts = [] if mask is None else [mask_blocks(mask)]
    parts += [] if ranges is None else [range_blocks(ranges, q_len, kv_len, len(group))]
    parts += [] if shown is None else [shown]
    return where, tables_of_blocks(parts, None if seen is None else seen[0], q_len, kv_len)
