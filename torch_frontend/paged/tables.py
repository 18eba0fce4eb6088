"""The tables of a paged call: block_table, seq_lens and cu_seqlens_q, as tensors or numpy arrays.

Those whose values their sizes decide, of the rows of a dense cache, are made once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from attn_core.call.spec import PagedKV
from attn_core.errors import DTypeError
from attn_core.paged import tables as paged_tables
from attn_core.paged.tables import TABLES
from torch_frontend.dispatch import offsets, plan, tensor_kinds

Tensor = torch.Tensor
_INT32 = torch.iinfo(torch.int32)


def tables_of(q: Tensor, k_pages: Tensor, max_len_q: int | None, *tables: Any) -> tuple[Any, Any, Any]:
    """Returns block_table, seq_lens and cu_seqlens_q as tensors.

    Checks the values of numpy tables and copies them to q's device. Clamps offsets on a GPU, so that no kernel can read
    out of bounds.
    """
    tables = tuple([as_int32(name, table) for name, table in zip(TABLES, tables)])
    for name, table in zip(TABLES[:2], tables):
        # Only cu_seqlens_q may be None; check_tensor names the other.
        if table is None:
            plan.check_tensor(name, table)
    if all(table is None or isinstance(table, np.ndarray) for table in tables):
        # On a CPU, `run` and `append` check the values of all tables later, whatever their type.
        if q.device.type != "cpu":
            check_values(max_len_q, q.shape[0], k_pages, *tables)
        _check_kinds(tables)
        return tuple(None if t is None else torch.from_numpy(t).to(q.device) for t in tables)  # type: ignore[return-value]
    for name, table in zip(TABLES, tables, strict=True):
        if table is not None:
            plan.check_tensor(name, table)
    block_table, seq_lens, cu = tables
    if cu is not None and not cu.is_cpu and cu.dtype == torch.int32 and cu.dim() == 1 and q.dim() == 3:
        cu = offsets.clamp(cu, q.shape[0])
    return block_table, seq_lens, cu


def op_tables(q: Tensor, *tables: Any) -> tuple[Any, Any, Any]:
    """Returns the tables of a call that becomes one op, in the form that ops accept together with q."""
    named = dict(zip(TABLES, tables, strict=True))
    for name, table in named.items():
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_tensor(name, table)
    _check_kinds(tables)
    tensor_kinds.check_data(q, **named)
    return tuple(tensor_kinds.to_device_of(q, t) if isinstance(t, np.ndarray) else t for t in tables)  # type: ignore[return-value]


def _check_kinds(tables: tuple[object, ...]) -> None:
    """Raises DTypeError for a numpy array of a dtype that no tensor has, such as dates."""
    for name, table in zip(TABLES, tables):
        if isinstance(table, np.ndarray) and table.dtype.kind not in "biufc":
            raise DTypeError(f"{name}: expected dtype int32 or int64, got {table.dtype}")


def check_values(max_len_q: int | None, tokens: int, pages: Tensor, block_table: Any, seq_lens: Any, cu: Any) -> None:
    """Checks the values of tables on the host. ``build_spec`` raises for wrong shapes and dtypes."""
    block_table, seq_lens, cu = (None if table is None else np.asarray(table) for table in (block_table, seq_lens, cu))
    if block_table.ndim != 2 or seq_lens.shape != block_table.shape[:1] or pages.dim() != 4:
        return
    if cu is not None and cu.shape != (len(seq_lens) + 1,):
        return
    paged = PagedKV(num_pages=pages.shape[0], page_size=pages.shape[1], width=block_table.shape[1])
    paged_tables.check_values(paged, tokens, max_len_q, block_table, seq_lens, cu)


def as_int32(name: str, table: Any) -> Any:
    """Returns an int64 table in int32, and any other argument as it is.

    On a GPU, numbers that int32 does not have become its nearest one, which is no page and no length, as before.

    Raises:
        SpecError: for a value on the CPU that int32 does not have.
    """
    if isinstance(table, np.ndarray):
        return paged_tables.as_int32(name, table)
    if not isinstance(table, Tensor) or table.dtype != torch.int64:
        return table
    plan.check_tensor(name, table)
    if table.is_cpu and not tensor_kinds.is_watched(table) and not tensor_kinds.is_cut(table):
        paged_tables.as_int32(name, table.numpy())
    return table.clamp(_INT32.min, _INT32.max).to(torch.int32)


def index_of(x: Tensor, name: str, array: Tensor | np.ndarray) -> Tensor:
    """Returns whole numbers as a tensor; a numpy array is copied to the device of x."""
    if not isinstance(array, np.ndarray):
        plan.check_tensor(name, array)
        return array  # type: ignore[no-any-return]
    if array.dtype not in (np.int32, np.int64):
        raise DTypeError(f"{name}: expected dtype int32 or int64, got {array.dtype}; cast it")
    return tensor_kinds.to_device_of(x, np.array(array, order="C"))  # torch takes no negative strides


def rows_as_table(batch: int, device: torch.device) -> Tensor:
    """Returns the block table of a dense cache: sequence i has page i. int32 ``[batch, 1]``. Do not write."""
    return _multiples(batch, 1, device, True)


def equal_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Returns the offsets of so many sequences of ``tokens`` each. int32 ``[batch + 1]``. Do not write."""
    return _multiples(batch + 1, tokens, device)


def places(tokens: int, device: torch.device) -> Tensor:
    """Returns the numbers from 0 to ``tokens - 1``. int32. Do not write."""
    return _multiples(tokens, 1, device)


def _multiples(count: int, step: int, device: torch.device, column: bool = False) -> Tensor:
    """Returns ``0, step, 2 * step, ...``, the same tensor for equal arguments and torch's current stream.

    A kernel on another stream could read the tensor before it is written, or after its memory is free. A CUDA graph
    reads its tensors for as long as it lives, so a new one from the graph's memory is returned while one is captured.
    Modes and compilers get a new one, too, because they take tensors for their own purposes.

    Args:
        column: whether the shape is ``[count, 1]``.
    """
    if torch.compiler.is_compiling() or tensor_kinds.are_modes_active():
        return _new(count, step, device, column)
    if device.type == "cpu":
        return _on_stream(count, step, device, column, 0)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _new(count, step, device, column)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_stream(count, step, device, column, torch._C._cuda_getCurrentRawStream(index))


def _new(count: int, step: int, device: torch.device, column: bool) -> Tensor:
    numbers = torch.arange(0, count * step, step, dtype=torch.int32, device=device)
    return numbers[:, None] if column else numbers


@lru_cache(maxsize=256)
def _on_stream(count: int, step: int, device: torch.device, column: bool, stream: int) -> Tensor:
    with torch.inference_mode(False):  # a call outside of inference mode reads it, too
        return _new(count, step, device, column)
