"""Keys and values in pages, for kernels that read pages and for backends that gather them.

A kernel gets aligned pools and table entries in range. A backend that gathers pages gets real numbers, and a dense call
with a mask or packed documents. FlashAttention 2 and 3 share their refusals and calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Buffers
from attn_core.backends.shared.readable import readable, whole_vectors, writable
from attn_core.backends.shared.triton import Description, has_triton, launch
from attn_core.call.spec import AttentionSpec, PagedKV
from attn_core.call.tensors import Inputs, PagedInputs
from attn_core.errors import ShapeError
from attn_core.paged.arguments import one_query_each
from attn_core.paged.quantised import real_numbers

if TYPE_CHECKING:
    from torch import Tensor


def pools(inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Returns k and v unchanged.

    Raises:
        ShapeError: if a kernel could read only a copy. Copying the whole pool on every call is never right.
    """
    for name, pool in (("k_pages", inputs.k), ("v_pages", inputs.v)):
        if not whole_vectors(pool):
            raise ShapeError(
                f"{name}: expected dense channels, and strides and an address that are multiples of 16 bytes, got "
                f"strides {list(pool.stride())} at {pool.data_ptr() % 16} bytes from one; a pool is never copied"
            )
    return inputs.k, inputs.v


def query_offsets(spec: AttentionSpec, inputs: PagedInputs) -> Tensor:
    """Returns int32 ``[documents + 1]``, contiguous: the caller's offsets, or those of one query per sequence."""
    import torch

    if inputs.cu_seqlens_q is None:
        return torch.arange(spec.q_len + 1, dtype=torch.int32, device=inputs.q.device)
    return inputs.cu_seqlens_q.contiguous()


def safe_tables(paged: PagedKV, inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    """Returns copies of (block_table, seq_lens), clamped so that no kernel reads outside the pool.

    With Triton, one kernel launch clamps both.
    """
    import torch

    table, lengths = inputs.block_table, inputs.seq_lens
    if not table.is_cuda or not has_triton():
        return table.clamp(0, paged.num_pages - 1), lengths.clamp(0, paged.capacity)
    from attn_core.paged import kernels

    safe_table = torch.empty(table.shape, dtype=torch.int32, device=table.device)
    table = table if table.stride(-1) == 1 else table.contiguous()
    lengths = lengths.contiguous()
    safe_lengths = torch.empty_like(lengths)
    entries, sequences, row, block = table.numel(), len(lengths), table.stride(0), 1024

    def describe() -> Description:
        # One grid covers the longer of table and lengths. The kernel divides by the width, so an empty table counts as
        # one of width 1.
        grid = max(1, -(-max(entries, sequences) // block)), 1, 1
        numbers = row, paged.num_pages, max(paged.width, 1), entries, sequences
        return grid, numbers, {"PAGE": paged.page_size, "BLOCK": block}

    key = ("sanitise", paged, entries, sequences, row)
    tensors = (table, lengths, safe_table, safe_lengths)
    launch(kernels.sanitise, key, tensors, describe)
    return safe_table, safe_lengths


def pools_and_scales(spec: AttentionSpec, inputs: PagedInputs) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the pools of keys and values, each with its scales; float8 pools as bytes, which torch can index."""
    import torch

    assert spec.paged is not None
    k, v = inputs.k.detach(), inputs.v.detach()
    if spec.paged.dtype == "float8_e4m3fn":
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    return (k, inputs.k_scales), (v, inputs.v_scales)


def in_slots(spec: AttentionSpec, inputs: PagedInputs, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values in slots, ``[slots, kv_heads, dim]``: as in the pool, or float32 if quantised."""
    assert spec.paged is not None
    if spec.paged.dtype is None:
        k, v = (_slots(pool.detach(), page, offset) for pool in (inputs.k, inputs.v))
        return k, v
    import torch

    dtype, by_page = spec.paged.dtype, spec.paged.scales == "page"
    k, v = (
        real_numbers(
            torch, _slots(pool, page, offset), scales[page] if by_page else _slots(scales, page, offset), dtype
        )
        for pool, scales in pools_and_scales(spec, inputs)
    )
    return k, v


def _slots(pool: Tensor, page: Tensor, offset: Tensor) -> Tensor:
    """Returns ``pool[page, offset]``, by one index where the pages of the pool lie next to each other, which is faster.

    Elsewhere, as in a pool with keys and values in turns, joining the axes would copy the whole pool.
    """
    if pool.stride(0) == pool.shape[1] * pool.stride(1):
        return pool.flatten(0, 1)[page * pool.shape[1] + offset]
    return pool[page, offset]


def in_pages(spec: AttentionSpec, inputs: PagedInputs, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of rows of pages ``[batch, width]`` as ``[batch, width * page_size, ...]``."""
    assert spec.paged is not None
    if spec.paged.dtype is None:
        k, v = (pool.detach()[pages].flatten(1, 2) for pool in (inputs.k, inputs.v))
        return k, v
    import torch

    dtype, size, by_page = spec.paged.dtype, spec.paged.page_size, spec.paged.scales == "page"
    k, v = (
        real_numbers(
            torch,
            pool[pages].flatten(1, 2),
            scales[pages].repeat_interleave(size, 1) if by_page else scales[pages].flatten(1, 2),
            dtype,
        )
        for pool, scales in pools_and_scales(spec, inputs)
    )
    return k, v


def working_dtype(spec: AttentionSpec) -> str:
    """Returns the dtype of a gathered call: float32 if the pages are quantised, because it rounds no number of them."""
    return spec.dtype if spec.paged is None or spec.paged.dtype is None else "float32"


def dense_rows(spec: AttentionSpec, rows: int) -> AttentionSpec:
    """Returns the dense call on gathered pages: one batch row of ``rows`` queries per sequence, and a mask.

    Each row has as many keys as the block table has room for; the mask hides keys beyond a sequence's length. With
    quantised pages it is a call in float32.
    """
    paged, batch = spec.paged, spec.documents or 0
    assert paged is not None
    unpaged: dict[str, Any] = {"paged": None, "documents": None, "max_len_q": None, "max_len_k": None}
    # The mask has causal and window, too: a sequence's diagonal depends on its length, unknown on the host.
    heads = spec.num_heads if (spec.key_ranges_shape or (1, 1))[1] > 1 else 1
    mask_shape = batch, heads, rows, paged.capacity
    dense: dict[str, Any] = {"causal": False, "window": (None, None), "mask_shape": mask_shape}
    dense["key_ranges_shape"] = None  # the mask has them, too
    dense["dtype"] = working_dtype(spec)
    if spec.alibi_shape is not None:  # of a sequence's own diagonal, too
        dense |= {"alibi_shape": None, "bias_shape": (batch, spec.num_heads, rows, paged.capacity)}
        dense["bias_dtype"] = None if spec.lse_dtype == dense["dtype"] else spec.lse_dtype
    return replace(spec, batch=batch, q_len=rows, kv_len=paged.capacity, **unpaged, **dense)


def packed_documents(spec: AttentionSpec, inputs: PagedInputs) -> tuple[AttentionSpec, Inputs]:
    """Returns a paged call as one on packed documents, for tables that are on the host and checked.

    With quantised pages it is a call in float32, whose result the caller casts to ``spec.dtype``.
    """
    import torch

    paged = spec.paged
    assert paged is not None
    table, lengths, cu_q = inputs.block_table, inputs.seq_lens.long(), query_offsets(spec, inputs)
    position = torch.arange(paged.capacity, device=lengths.device).expand(len(lengths), -1)  # [batch, capacity]
    valid = position < lengths[:, None]
    keys = lengths
    if inputs.kv_starts is not None:  # without its first keys a document has the same diagonal
        valid, keys = valid & (position >= inputs.kv_starts[:, None]), lengths - inputs.kv_starts
    cu_k = torch.nn.functional.pad(keys.cumsum(0), (1, 0)).int()
    page = table.long().repeat_interleave(paged.page_size, dim=1)[valid]
    k, v = in_slots(spec, inputs, page, (position % paged.page_size)[valid])  # [tokens, kv_heads, dim]
    ranges = inputs.key_ranges
    if ranges is not None:
        # The number of each key among the new tokens of its sequence; negative for earlier keys.
        place = position - (lengths - cu_q.diff().long())[:, None]
        token = (cu_q[:-1, None] + place).clamp(0, spec.q_len - 1)[valid]
        everyone = ranges.new_zeros(ranges.shape[3:])
        everyone[0, 1] = spec.q_len
        ranges = torch.where((place < 0)[valid][:, None, None], everyone, ranges[:, :, token])
    changes: dict[str, Any] = {"key_ranges_shape": None if ranges is None else tuple(ranges.shape)}
    changes["max_len_k"] = int(keys.max()) if len(keys) else 0
    packed = replace(spec, paged=None, kv_len=len(page), dtype=working_dtype(spec), **changes)
    others = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "alibi_slopes": inputs.alibi_slopes}
    return packed, Inputs(inputs.q.to(k.dtype), k, v, sinks=inputs.sinks, key_ranges=ranges, **others)


FLASH2_PAGES = 256
"""FlashAttention 2 takes page sizes that are multiples of this."""
FLASH3_PAGE = 80
"""From this page size on, a page may hold a whole tile of keys. FlashAttention 3 then loads whole tiles if the queries
fill a tile of their own."""
FLASH3_ROWS = 64
"""Up to this many queries times heads of a group, the queries do not fill a tile."""


def flash2_refusals(spec: AttentionSpec, name: str, width: int) -> Iterator[str]:
    """Yields refusals of page sizes and widths. width: the head dimension that the kernel would run the call at."""
    page_size = spec.paged.page_size if spec.paged else 0
    if page_size % FLASH2_PAGES:
        yield f"page_size={page_size}: {name} takes pages of multiples of {FLASH2_PAGES} tokens"
    yield from _padded(spec, name, {width})


def flash3_refusals(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    """Yields refusals of widths, and of pages that the kernel would read past the end of a sequence.

    On an H200, a NaN behind a sequence's end reached the output.
    """
    page_size = spec.paged.page_size if spec.paged else 0
    yield from _padded(spec, name, widths)
    if page_size >= FLASH3_PAGE and (spec.max_len_q or 0) * spec.group_size > FLASH3_ROWS:
        why = "reads last pages to their end, so a NaN left there by another sequence would reach the output"
        yield f"page_size={page_size} with {spec.max_len_q} queries of a sequence: {name} {why}"


def _padded(spec: AttentionSpec, name: str, widths: set[int]) -> Iterator[str]:
    if widths != {spec.head_dim} or spec.value_dim != spec.head_dim:
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} would need a padded copy of the whole pool"


def flash2(
    spec: AttentionSpec,
    inputs: PagedInputs,
    into: Buffers | None,
    varlen_fwd: Callable[..., Sequence[Tensor]],
    settings: tuple[object, ...],
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse). The kernel takes each sequence's length from ``seqused_k`` and ignores the key offsets."""
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    queries, buffer = query_offsets(spec, inputs), None if into is None else writable(into[0])
    offsets = (queries, queries, lengths, None, table)  # key offsets are required but unused with lengths
    results = varlen_fwd(readable(inputs.q), k, v, buffer, *offsets, *settings, False, None)
    # The log-sum-exp is the third result from the end in every version of flash-attn; see flash2.
    out, lse = results[0], results[-3]
    # The kernel may return another view of the buffer, which the caller would copy onto itself.
    out = buffer if buffer is not None and out.data_ptr() == buffer.data_ptr() else out
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def flash3(
    spec: AttentionSpec,
    inputs: PagedInputs,
    into: Buffers | None,
    operator: Callable[..., Callable[..., Sequence[Tensor]]],
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse). One query per sequence runs as a batch of one-query rows, which the kernel splits best.

    Args:
        operator: returns a function of the tensors with the names that it gets.
    """
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    q, buffer = readable(inputs.q), None if into is None else writable(into[0])
    alone, out = one_query_each(spec), buffer
    if alone:  # [tokens, heads, head_dim] -> [tokens, 1, heads, head_dim]
        q, out = q[:, None], None if out is None else out[:, None]
    run = operator("q", "k", "v", "page_table", "seqused_k", "out", "cu_seqlens_q")
    result, lse, *_ = run(q, k, v, table, lengths, out, None if alone else inputs.cu_seqlens_q.contiguous())
    if buffer is not None:
        result = buffer
    elif alone:
        result = result[:, 0]
    return result, lse[..., 0].T if alone else lse  # [tokens, heads, 1] -> [heads, tokens]
