"""Checks that the inputs of a layer are plain tensors that belong together."""

from __future__ import annotations

from typing import Any

from attn_core.call.kinds import check_kind
from attn_core.errors import DeviceError
from attn_core.paged.step import Pages
from torch_frontend.dispatch.plan import check_tensor
from torch_frontend.dispatch.tensor_kinds import check_data


def check_inputs(x: Any, context: Any, positions: Any, pages: Any) -> None:
    """Checks a layer's inputs before it reads their shapes; all but x may be None.

    Raises:
        TypeError, SpecError, DeviceError: naming the input.
    """
    for name, tensor in (("x", x), ("context", context), ("positions", positions)):
        if tensor is not None or name == "x":
            check_tensor(name, tensor)
    if pages is not None:
        check_kind("pages", pages, Pages, "Pages(k, v, step)")
    if context is not None and context.device != x.device:
        raise DeviceError(f"context: expected the device of x ({x.device}), got {context.device}; move it there")
    check_data(x, context=context, positions=positions)
