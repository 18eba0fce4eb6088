"""Operands of a paged call as tensors on the device of the queries: key ranges and first keys of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core.call.key_ranges import check_values
from attn_core.errors import DTypeError
from attn_core.paged.tables import check_starts
from torch_frontend.dispatch import plan, tensor_kinds

Tensor = torch.Tensor


def ranges_of(q: Tensor, key_ranges: Any) -> Tensor | None:
    """Returns key_ranges as a tensor. Checks the values of numpy's arrays and copies them to q's device."""
    if key_ranges is None:
        return None
    if not isinstance(key_ranges, np.ndarray):
        plan.check_tensor("key_ranges", key_ranges)
        return key_ranges  # type: ignore[no-any-return]
    if key_ranges.dtype != np.int32:
        raise DTypeError(f"key_ranges: expected dtype int32, got {key_ranges.dtype}; cast it to int32")
    # On a CPU ``run`` checks the values. ``build_spec`` raises for a wrong shape.
    if q.device.type != "cpu" and key_ranges.ndim == 5 and key_ranges.shape[-1] == 2:
        check_values(key_ranges, q.shape[0])
    return tensor_kinds.to_device_of(q, np.array(key_ranges, order="C"))


def starts_of(q: Tensor, kv_starts: Any, seq_lens: Any) -> Tensor | None:
    """Returns kv_starts as a tensor. Compares numpy's values with lengths in numpy, and copies them to q's device."""
    starts = _int32_of(q, "kv_starts", kv_starts)
    # On a CPU ``run`` checks the values. ``build_spec`` raises for a wrong shape.
    if _are_known(q, kv_starts, seq_lens) and kv_starts.shape == seq_lens.shape:
        check_starts(kv_starts, seq_lens)
    return starts


def _are_known(q: Tensor, array: Any, seq_lens: Any) -> bool:
    """Returns whether the values of a call on a GPU are numpy's."""
    return q.device.type != "cpu" and isinstance(array, np.ndarray) and isinstance(seq_lens, np.ndarray)


def _int32_of(q: Tensor, name: str, array: Any) -> Tensor | None:
    if array is None:
        return None
    if not isinstance(array, np.ndarray):
        plan.check_tensor(name, array)
        return array  # type: ignore[no-any-return]
    if array.dtype != np.int32:
        raise DTypeError(f"{name}: expected dtype int32, got {array.dtype}; cast it to int32")
    return tensor_kinds.to_device_of(q, np.array(array, order="C"))
