"""The key ranges of a paged call: a mask among the new tokens, as a tensor on the device of the queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from attn_core.call.key_ranges import check_values
from attn_core.errors import DTypeError
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
