"""Tensors on a GPU that nothing writes to, and what backends made from them.

A caller may change a tensor at any time, also in ways that torch does not count. So a backend keeps what it made from a
tensor only if the tensor is our own copy of values on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any

MOST_RESULTS = 8
"""The most results that are kept for a tensor. Beyond it all of them are dropped."""
_results: dict[int, dict[Hashable, Any]] = {}
"""By the address of a constant tensor, what was made from it."""


def declare(tensor: Any) -> Any:
    """Declares that nothing writes to a tensor, as long as the object exists; returns the tensor."""
    address = tensor.data_ptr()
    _results[address] = {}
    weakref.finalize(tensor, _results.pop, address, None)
    return tensor


def made_from(tensor: Any, key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the result of ``make``, kept by ``key`` and torch's current stream if the tensor is a constant.

    While a CUDA graph is captured nothing is kept or reused: the graph has its own memory.
    """
    import torch

    kept = _results.get(tensor.data_ptr())
    if kept is None or torch.cuda.is_current_stream_capturing():
        return make()
    place = key, torch._C._cuda_getCurrentRawStream(tensor.device.index)
    result = kept.get(place)
    if result is None:
        if len(kept) >= MOST_RESULTS:
            kept.clear()
        result = kept[place] = make()
    return result
