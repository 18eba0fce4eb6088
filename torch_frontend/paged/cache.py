"""The pools of pages: PagedKVCache, which has those of all layers; how many pages fit; pools of other libraries."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack, overload

import numpy as np
import torch

from attn_core.call.hints import SharedOptions
from attn_core.call.keywords import CachedKeywords
from attn_core.errors import DeviceError
from attn_core.paged import pools as paged_pools
from attn_core.paged.allocator import Copies
from attn_core.paged.cache import CacheSizes, PagedCache
from attn_core.paged.pools import PoolSizes
from attn_core.paged.step import Step
from torch_frontend.dispatch.plan import check_tensor, device_of
from torch_frontend.paged.append import append_kv
from torch_frontend.paged.attention import paged_attention

Tensor = torch.Tensor


class _Keywords(CachedKeywords[Tensor], total=False):
    out: Tensor | None


class _OnHost(NamedTuple):
    """Pages of a sequence in host memory.

    Attributes:
        copies: one for each pool.
        copied: when a GPU has written them; None on a CPU.
    """

    copies: list[Tensor]
    copied: torch.cuda.Event | None


_shared = SharedOptions(paged_attention, {*CachedKeywords.__optional_keys__, "return_lse", "out"})


class PagedKVCache(PagedCache[Tensor]):
    """The keys and values of all layers, in pages that the sequences share.

    Args:
        dtype, device: of the pools.
        num_layers, num_pages, page_size, kv_heads, head_dim, value_dim, kv_dtype: as in ``PagedCache``.
    """

    _append = staticmethod(append_kv)

    @SharedOptions(PagedCache.__init__, CacheSizes.__annotations__)
    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | int = "cpu",
        kv_dtype: torch.dtype | str | None = None,
        **sizes: Unpack[CacheSizes],
    ) -> None:
        place = device_of(device)

        def new(shape: tuple[int, ...], name: str) -> Tensor:
            make = torch.zeros if len(shape) == 4 else torch.ones
            return make(shape, dtype=getattr(torch, name), device=place)

        super().__init__(new, dtype=name_of(dtype), kv_dtype=name_of(kv_dtype), **sizes)
        self.dtype = dtype

    @overload
    def attend(
        self, layer: int, q: Tensor, step: Step, *, return_lse: Literal[False] = False, **options: Unpack[_Keywords]
    ) -> Tensor: ...
    @overload
    def attend(
        self, layer: int, q: Tensor, step: Step, *, return_lse: Literal[True], **options: Unpack[_Keywords]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attend(
        self, layer: int, q: Tensor, step: Step, *, return_lse: bool, **options: Unpack[_Keywords]
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @_shared
    def attend(self, layer: int, q: Tensor, step: Step, **options: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Runs ``check``, then ``paged_attention`` of a layer's queries ``[tokens, heads, head_dim]`` with options."""
        every = _shared.complete(PagedKVCache.attend, options)
        return self._attend(paged_attention, layer, q, step, every)  # type: ignore[no-any-return]

    def _copy(self, copies: Copies) -> None:
        source, target = (torch.tensor(pages, device=self.k_pages[0].device) for pages in copies)
        # In place, because a captured CUDA graph reads these very tensors.
        for pool in _indexable(self._pool_lists()):
            pool[target] = pool[source]

    def _to_host(self, pages: tuple[int, ...]) -> _OnHost:
        device = self.k_pages[0].device
        index, pinned = torch.tensor(pages, dtype=torch.int64, device=device), device.type == "cuda"
        copies = []
        for pool in _indexable(self._pool_lists()):
            there = torch.empty((len(pages), *pool.shape[1:]), dtype=pool.dtype, device="cpu", pin_memory=pinned)
            # Without waiting for the GPU: what follows on its stream may overwrite the pages, but not before the copy.
            copies.append(there.copy_(pool[index], non_blocking=pinned))
        return _OnHost(copies, torch.cuda.current_stream(device).record_event() if pinned else None)

    def _from_host(self, there: _OnHost, pages: tuple[int, ...]) -> None:
        device = self.k_pages[0].device
        index = torch.tensor(pages, dtype=torch.int64, device=device)
        if there.copied is not None:  # another stream than this one may have copied
            torch.cuda.current_stream(device).wait_event(there.copied)
        # In place, because a captured CUDA graph reads these very tensors.
        for pool, copy in zip(_indexable(self._pool_lists()), there.copies, strict=True):
            pool[index] = copy.to(device, non_blocking=True)

    def _to_device(self, array: np.ndarray | None) -> Tensor | None:
        return None if array is None else torch.from_numpy(array).to(self.k_pages[0].device)

    def _is_traced(self) -> bool:
        return torch.compiler.is_compiling()


def _indexable(lists: tuple[list[Tensor], ...]) -> list[Tensor]:
    """Returns the pools of all layers. One-byte dtypes are bytes, because torch cannot index all of them everywhere."""
    pools = [pool for pools in lists for pool in pools]
    return [pool.view(torch.uint8) if pool.itemsize == 1 else pool for pool in pools]


@SharedOptions(paged_pools.pages_that_fit, PoolSizes.__annotations__)
def pages_that_fit(
    memory: int | None = None,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | int = "cuda",
    fraction: float = 0.9,
    **sizes: Unpack[PoolSizes],
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
        memory = paged_pools.part_of(_free_memory(device), fraction)
    return paged_pools.pages_that_fit(memory, dtype=name_of(dtype), **sizes)


def name_of(dtype: torch.dtype | str | None) -> Any:
    """Returns the name of a dtype; another value, such as a name, as it is."""
    return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype


def _free_memory(device: torch.device | str | int) -> int:
    device = device_of(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        raise DeviceError(
            f"device={device}: expected a GPU, whose free memory torch can tell; else pass memory in bytes"
        )
    return int(torch.cuda.mem_get_info(device)[0])


def pages_of(cache: Tensor | tuple[Tensor, Tensor], layout: str) -> tuple[Tensor, Tensor]:
    """Returns a pool of another library as ``(k_pages, v_pages)``: views of its memory, so nothing is copied.

    ``append_kv`` on the views writes into the cache.

    Args:
        cache: one tensor with keys and values, or a pair of tensors.
        layout: "NHD", "HND", "vllm", "interleaved" or "heads_first"; ``attn_core.paged.pools.pages_of`` says which
            axes and errors these have.
    """
    return paged_pools.pages_of(cache, layout, check_tensor, Tensor.permute)
