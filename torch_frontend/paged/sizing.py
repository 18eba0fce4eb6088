"""pages_that_fit: the pages of a cache from the free memory of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.errors import DeviceError, SpecError, shown
from attn_core.paged.allocation import sizing


def pages_that_fit(
    memory: int | None = None,
    *,
    page_size: int,
    num_layers: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype | str = torch.float32,
    device: Any = "cuda",
    fraction: float = 0.9,
) -> int:
    """Returns how many pages fit: the ``num_pages`` of a ``PagedKVCache`` of these sizes.

    Call it when the model is loaded and has run once, because its own memory is then no longer free.

    Args:
        memory: bytes; ``fraction`` of the GPU's free memory if None.
        page_size, num_layers, kv_heads, head_dim, value_dim, dtype: as in ``attn_core.pages_that_fit``.
        device: the GPU whose free memory counts, as the driver reports it. Memory that torch has reserved and does not
            use is not free; ``torch.cuda.empty_cache()`` frees it.
        fraction: above 0 and at most 1. The rest is for activations.

    Raises:
        SpecError: for less memory than a page needs, or a wrong size. DTypeError: for another dtype.
        DeviceError: if ``memory`` is None and the device is no GPU.
    """
    if memory is None:
        memory = sizing.part_of(_free_memory(device), fraction)
    return sizing.pages_that_fit(
        memory,
        page_size=page_size,
        num_layers=num_layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=name_of(dtype),
    )


def name_of(dtype: Any) -> Any:
    """Returns the name of a dtype; another value, such as a name, as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _free_memory(device: Any) -> int:
    try:
        device = torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"device={shown(device)}: expected a torch.device or its name; {error}") from None
    if device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(
            f"device={device}: expected a GPU, whose free memory torch can tell; else pass memory in bytes"
        )
    return int(torch.cuda.mem_get_info(device)[0])
