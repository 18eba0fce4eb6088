"""The tables of a paged call as int32 tensors: int64 ones are cast, on their own device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core.paged import tables
from torch_frontend.dispatch import plan, tensor_kinds

Tensor = torch.Tensor
_INT32 = torch.iinfo(torch.int32)


def as_int32(name: str, table: Any) -> Any:
    """Returns an int64 table in int32, and any other argument as it is.

    On a GPU, numbers that int32 does not have become its nearest one, which is no page and no length, as before.

    Raises:
        SpecError: for a value on the CPU that int32 does not have.
    """
    if isinstance(table, np.ndarray):
        return tables.as_int32(name, table)
    if not isinstance(table, Tensor) or table.dtype != torch.int64:
        return table
    plan.check_tensor(name, table)
    if table.is_cpu and not tensor_kinds.is_watched(table) and not tensor_kinds.is_cut(table):
        tables.as_int32(name, table.numpy())
    return table.clamp(_INT32.min, _INT32.max).to(torch.int32)
