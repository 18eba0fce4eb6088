"""pages_that_fit: the pages of a cache from the free memory of a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
    dtype: Any = jnp.float32,
    device: Any = None,
    fraction: float = 0.9,
) -> int:
    """Returns how many pages fit: the ``num_pages`` of a ``PagedKVCache`` of these sizes.

    Call it when the model is loaded and has run once, because its own memory is then no longer free.

    Args:
        memory: bytes; ``fraction`` of the GPU's free memory if None.
        page_size, num_layers, kv_heads, head_dim, value_dim, dtype: as in ``attn_core.pages_that_fit``.
        device: the GPU whose free memory counts, JAX's first one if None. Free is what JAX may use, by default three
            quarters of the GPU, and does not use yet.
        fraction: above 0 and at most 1. The rest is for activations.

    Raises:
        SpecError: for less memory than a page needs, or a wrong size. DTypeError: for another dtype.
        DeviceError: if ``memory`` is None and the device does not tell its free memory, as a CPU does not.
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
    if dtype is None or isinstance(dtype, str):
        return dtype
    try:
        return np.dtype(dtype).name
    except (TypeError, ValueError):
        return dtype


def _free_memory(device: Any) -> int:
    device = jax.devices()[0] if device is None else device
    if not isinstance(device, jax.Device):
        raise SpecError(f"device={shown(device)}: expected a jax.Device, or None")
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise DeviceError(f"device={device}: expected a GPU, which tells its free memory; else pass memory in bytes")
    return int(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
