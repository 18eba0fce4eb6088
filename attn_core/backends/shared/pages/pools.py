"""Prepares page pools and block tables for third-party kernels: checks alignment, clamps table entries into range."""

from __future__ import annotations

from typing import Any

from attn_core.backends.shared.programs.triton import Description, has_triton, launch
from attn_core.backends.shared.readable import whole_vectors
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.errors import ShapeError


def pools(inputs: PagedInputs) -> tuple[Any, Any]:
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


def query_offsets(spec: AttentionSpec, inputs: PagedInputs) -> Any:
    """Returns int32 ``[documents + 1]``, contiguous: the caller's offsets, or those of one query per sequence."""
    import torch

    if inputs.cu_seqlens_q is None:
        return torch.arange(spec.q_len + 1, dtype=torch.int32, device=inputs.q.device)
    return inputs.cu_seqlens_q.contiguous()


def safe_tables(paged: PagedKV, inputs: PagedInputs) -> tuple[Any, Any]:
    """Returns copies of (block_table, seq_lens), clamped so that no kernel reads outside the pool.

    With Triton, one kernel launch clamps both.
    """
    import torch

    table, lengths = inputs.block_table, inputs.seq_lens
    if not table.is_cuda or not has_triton():
        return table.clamp(0, paged.num_pages - 1), lengths.clamp(0, paged.capacity)
    from attn_core.paged import triton_tables

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
    launch(triton_tables.sanitise, key, tensors, describe)
    return safe_table, safe_lengths
