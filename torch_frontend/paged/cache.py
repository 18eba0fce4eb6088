"""PagedKVCache: the page pools of all layers of a model, with their allocator."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Never, Unpack, overload

import numpy as np
import torch

from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.keywords import CachedKeywords
from attn_core.errors import SpecError, shown
from attn_core.paged.allocation.allocator import Copies, PageAllocator
from attn_core.paged.allocation.cache_sizes import check_cache, describe_cache, stored_shape
from attn_core.paged.cache import PagedCache
from attn_core.paged.step import Step
from torch_frontend.paged.attention import append_kv, paged_attention
from torch_frontend.paged.sizing import name_of

Tensor = torch.Tensor
Keywords = CachedKeywords[Tensor]


class _OnHost(NamedTuple):
    """Pages of a sequence in host memory.

    Attributes:
        copies: one for each pool.
        copied: when a GPU has written them; None on a CPU.
    """

    copies: list[Tensor]
    copied: torch.cuda.Event | None


class PagedKVCache(PagedCache):
    """The keys and values of all layers, in pages that the sequences share.

    Args:
        num_layers: the layers of the model. Every layer has a pool; all layers share one block table.
        num_pages, page_size: the size of each pool, which has room for ``num_pages * page_size`` tokens.
        kv_heads, head_dim, value_dim: the sizes of a token's key and value; value_dim is head_dim if None.
        dtype, device: of the pools.
        kv_dtype: "float8_e4m3fn", "int8", "int4" or such a dtype for quantised pages with a scale for each token and kv
            head; dtype is then that of the queries. None: the pools have dtype.

    Attributes:
        k_pages, v_pages: a pool for each layer, ``[num_pages, page_size, kv_heads, dim]``.
        k_scales, v_scales: the scales of each layer, float32 ``[num_pages, page_size, kv_heads]``; empty lists if the
            pages are not quantised.
        dtype: of queries, new keys and new values.
        stored: how a token is stored, and in how many bytes.
        allocator: assigns pages to sequences; ``allocator.report()`` returns how full the pools are.

    In each step of a model, call ``step`` once for the continuing sequences, then ``update`` and ``attend`` in every
    layer.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = "cpu",
        kv_dtype: torch.dtype | str | None = None,
    ) -> None:
        dims = {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
        name = str(dtype).removeprefix("torch.")
        check_cache(name, num_layers=num_layers, kv_heads=kv_heads, **dims)
        kv_name = name_of(kv_dtype)
        stored, channels = stored_shape(kv_name, **dims)
        try:
            device = torch.device(device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SpecError(f"device={shown(device)}: expected a torch.device or its name; {error}") from None
        self.allocator, self._swapped = PageAllocator(num_pages, page_size), {}
        self.dtype = dtype
        self.stored = describe_cache(kv_name, page_size, kv_heads, dims, name)
        pool_dtype, places = getattr(torch, stored or name), (num_pages, page_size, kv_heads)
        self.k_pages, self.v_pages = (
            [torch.zeros(*places, dim, dtype=pool_dtype, device=device) for _ in range(num_layers)]
            for dim in channels.values()
        )
        scaled = num_layers if stored else 0
        self.k_scales, self.v_scales = ([torch.ones(places, device=device) for _ in range(scaled)] for _ in "kv")

    def update(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        step: Step,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        """Writes a layer's new keys and values, ``[tokens, kv_heads, dim]``, into the step's slots.

        Args:
            rotary, rotary_interleaved: as in ``append_kv``.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist. Nothing is written then.
        """
        k_pages, v_pages = self._pools(layer, step)
        turns: Any = {"rotary": rotary, "rotary_interleaved": rotary_interleaved}
        append_kv(k_pages, v_pages, k, v, **step.tables, **turns, **self._scales(layer))

    @overload
    def attend(
        self,
        layer: int,
        q: Tensor,
        step: Step,
        *,
        return_lse: Literal[False] = False,
        out: Tensor | None = None,
        **options: Unpack[Keywords],
    ) -> Tensor: ...
    @overload
    def attend(
        self,
        layer: int,
        q: Tensor,
        step: Step,
        *,
        return_lse: Literal[True],
        out: Tensor | None = None,
        **options: Unpack[Keywords],
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def attend(
        self,
        layer: int,
        q: Tensor,
        step: Step,
        *,
        return_lse: bool,
        out: Tensor | None = None,
        **options: Unpack[Keywords],
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @hide_unknown
    def attend(
        self,
        layer: int,
        q: Tensor,
        step: Step,
        *,
        causal: bool = True,
        window: int | tuple[int | None, int | None] | None = None,
        key_ranges: Any = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
        deterministic: bool = False,
        backend: str | tuple[str, ...] | None = None,
        return_lse: bool = False,
        alibi_slopes: Tensor | None = None,
        out: Tensor | None = None,
        invariant: str | None = None,
        **unknown: Never,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs ``check``, then ``paged_attention`` of a layer's queries ``[tokens, heads, head_dim]`` with options."""
        if unknown:
            refuse_keywords(PagedKVCache.attend, unknown)
        k_pages, v_pages = self._pools(layer, step)
        return paged_attention(
            q,
            k_pages,
            v_pages,
            **step.tables,
            max_len_q=step.max_len_q,
            causal=causal,
            window=window,
            key_ranges=key_ranges,
            softcap=softcap,
            sinks=sinks,
            scale=scale,
            deterministic=deterministic,
            backend=backend,
            return_lse=return_lse,
            alibi_slopes=alibi_slopes,
            out=out,
            invariant=invariant,
            **self._scales(layer),
        )

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
            copies.append(there.copy_(pool[index], non_blocking=pinned))
        return _OnHost(copies, torch.cuda.current_stream(device).record_event() if pinned else None)

    def _from_host(self, there: _OnHost, pages: tuple[int, ...]) -> None:
        device = self.k_pages[0].device
        index = torch.tensor(pages, dtype=torch.int64, device=device)
        if there.copied is not None:
            torch.cuda.current_stream(device).wait_event(there.copied)
        # In place, because a captured CUDA graph reads these very tensors.
        for pool, copy in zip(_indexable(self._pool_lists()), there.copies, strict=True):
            pool[index] = copy.to(device, non_blocking=True)

    def _to_device(self, array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(array).to(self.k_pages[0].device)

    def _is_traced(self) -> bool:
        return torch.compiler.is_compiling()


def _indexable(lists: tuple[list[Tensor], ...]) -> list[Tensor]:
    """Returns the pools of all layers. One-byte dtypes are bytes, because torch cannot index all of them everywhere."""
    pools = [pool for pools in lists for pool in pools]
    return [pool.view(torch.uint8) if pool.itemsize == 1 else pool for pool in pools]
