"""The pools and tables of other libraries as ``paged_attention`` and ``append_kv`` take them, for torch tensors."""

from __future__ import annotations

import torch

from attn_core.paged.allocation.allocator import UNUSED
from attn_core.paged.layouts import view_of_pair, views_of_one
from attn_core.paged.row_tables import check_row_types, check_rows
from torch_frontend.dispatch.plan import check_tensor, facts
from torch_frontend.dispatch.tensor_kinds import check_data
from torch_frontend.dispatch.transforms import is_one_op

Tensor = torch.Tensor


def pages_of(cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Returns a pool of another library as ``(k_pages, v_pages)``: views of its memory, so nothing is copied.

    ``append_kv`` on the views writes into the cache. Axes by layout, as a pair of arrays and as one array:

    - ``"NHD"``: ``[pages, size, heads, dim]``; ``[pages, 2, size, heads, dim]`` (FlashInfer).
    - ``"HND"``: ``[pages, heads, size, dim]``; ``[pages, 2, heads, size, dim]`` (FlashInfer).
    - ``"vllm"``: ``[blocks, size, heads, dim]``; ``[blocks, 2, size, heads, dim]`` or ``[2, blocks, ...]``, whichever
      has the axis of 2.
    - ``"interleaved"``: only as one array, ``[pages, size, 2 * heads, dim]``, keys at even heads (JAX's
      ragged_paged_attention).
    - ``"heads_first"``: only as a pair, ``[heads, pages, size, dim]`` (JAX's paged_attention).

    Args:
        cache: one tensor with keys and values, or a pair of tensors, whose dims may differ.
        layout: one of the names above.

    Returns:
        k_pages ``[num_pages, page_size, kv_heads, head_dim]``, and v_pages.

    Raises:
        SpecError: for an unknown layout, or one that the cache's form does not have.
        ShapeError: for a shape that is not of the layout, or that fits two orders of the axes.
        TypeError: for a cache that is neither a tensor nor a pair of tensors.
    """
    if isinstance(cache, tuple | list) and len(cache) == 2:
        pools = []
        for name, pool in zip(("cache[0]", "cache[1]"), cache, strict=True):
            check_tensor(name, pool)
            pools.append(pool.permute(view_of_pair(name, layout, tuple(pool.shape)).order))
        return pools[0], pools[1]
    check_tensor("cache", cache)
    keys, values = views_of_one(layout, tuple(cache.shape))  # type: ignore[union-attr]
    return cache[keys.part].permute(keys.order), cache[values.part].permute(values.order)  # type: ignore[call-overload, union-attr]


def table_of_rows(
    indptr: Tensor, indices: Tensor, last_page_len: Tensor, *, page_size: int, width: int
) -> tuple[Tensor, Tensor]:
    """Returns (block_table, seq_lens) of FlashInfer's table in CSR. Its values stay on the device.

    Args:
        indptr: int32 ``[batch + 1]``: row b has the pages ``indices[indptr[b] : indptr[b + 1]]``.
        indices: int32 ``[pages in use or more]``.
        last_page_len: int32 ``[batch]``: tokens in the last page of each row.
        page_size: tokens in a page.
        width: columns of the result, at least the most pages of a row.

    Returns:
        int32 ``[batch, width]``, -1 behind a row's pages, and int32 ``[batch]``.

    Raises:
        DTypeError, ShapeError, DeviceError: for tensors that are no table in CSR.
        SpecError: for wrong values in tensors on the CPU. Values on a GPU are not read: a longer row is cut at
            ``width``, and entries outside of ``indices`` become -1.
    """
    named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    for name, tensor in named.items():
        check_tensor(name, tensor)
    check_data(indptr, indices=indices, last_page_len=last_page_len)
    all_facts = {name: facts(each.shape, each.dtype, each.device) for name, each in named.items()}
    check_row_types(all_facts, page_size, width)
    if indptr.is_cpu and not is_one_op(indptr):
        check_rows(indptr.numpy(), indices.numpy(), last_page_len.numpy(), page_size, width)
    column = torch.arange(width, dtype=torch.int32, device=indptr.device)
    place = indptr[:-1, None] + column  # [batch, width]
    used = (place < indptr[1:, None]) & (place >= 0) & (place < len(indices))
    if len(indices) == 0:
        table = indptr.new_full(place.shape, UNUSED)
    else:
        table = torch.where(used, indices[place.clamp(0, len(indices) - 1)], UNUSED)
    count = indptr[1:] - indptr[:-1]
    tokens = (count - 1) * page_size + last_page_len.clamp(0, page_size)
    lengths = torch.where(count > width, width * page_size, torch.where(count > 0, tokens, 0))
    return table.int(), lengths.int()
