"""PagedKVCache: the page pools of all layers of a model, with their allocator."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch

from attn_core.paged.allocator import Copies, PageAllocator
from attn_core.paged.arguments import check_cache, check_layer
from attn_core.paged.step import Step, check_step, take_step
from torch_frontend.paged.attention import append_kv, paged_attention

Tensor = torch.Tensor


class PagedKVCache:
    """The keys and values of all layers, in pages that the sequences share.

    Args:
        num_layers: the layers of the model. Every layer has a pool; all layers share one block table.
        num_pages, page_size: the size of each pool, which has room for ``num_pages * page_size`` tokens.
        kv_heads, head_dim, value_dim: the sizes of a token's key and value; value_dim is head_dim if None.
        dtype, device: of the pools.

    Attributes:
        k_pages, v_pages: a pool for each layer, ``[num_pages, page_size, kv_heads, dim]``.
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
    ) -> None:
        dims = {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
        check_cache(str(dtype).removeprefix("torch."), num_layers=num_layers, kv_heads=kv_heads, **dims)
        self.allocator = PageAllocator(num_pages, page_size)
        self.k_pages, self.v_pages = (
            [torch.zeros(num_pages, page_size, kv_heads, dim, dtype=dtype, device=device) for _ in range(num_layers)]
            for dim in dims.values()
        )

    def add(self, name: Hashable) -> None:
        """Starts a sequence without tokens."""
        self.allocator.allocate(name)

    def fork(self, parent: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Starts a sequence that shares the parent's first ``tokens`` (all if None), without a copy."""
        self.allocator.fork(parent, name, tokens)

    def free(self, name: Hashable) -> None:
        """Ends a sequence and frees its pages."""
        self.allocator.free(name)

    def step(self, names: Sequence[Hashable], new: int | Sequence[int] = 1, *, width: int | None = None) -> Step:
        """Reserves slots for new tokens of each sequence and returns the step: its tables are on the device.

        Pages that a sequence shares with others are copied before it writes to them.

        Args:
            names: the sequences, in the order of their tokens in q, k and v.
            new: the number of new tokens, one for all sequences or one for each.
            width: columns of the table. A fixed width keeps shapes equal in every step (compiled code, CUDA graphs).

        Raises:
            PoolFullError: if the pool has too few free pages. SpecError: for invalid arguments. Both leave the cache
                unchanged.
        """
        return take_step(self.allocator, names, new, width, self._copy, self._to_device)

    def update(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Writes a layer's new keys and values, ``[tokens, kv_heads, dim]``, into the step's slots.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist. Nothing is written then.
        """
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        append_kv(self.k_pages[layer], self.v_pages[layer], k, v, **step.tables)

    def attend(self, layer: int, q: Tensor, step: Step, **options: Any) -> Any:
        """Runs ``check``, then ``paged_attention`` of a layer's queries ``[tokens, heads, head_dim]`` with options."""
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        k_pages, v_pages = self.k_pages[layer], self.v_pages[layer]
        return paged_attention(q, k_pages, v_pages, **step.tables, max_len_q=step.max_len_q, **options)

    def check(self, step: Step) -> None:
        """Checks that a step's tables are still valid. ``update`` and ``attend`` call it; call it before ``append_kv``.

        Raises:
            SpecError: naming the sequence that was freed, forked or stepped again after the step was taken.
        """
        if not torch.compiler.is_compiling():
            check_step(self.allocator, step)

    def _copy(self, copies: Copies) -> None:
        source, target = (torch.tensor(pages, device=self.k_pages[0].device) for pages in copies)
        for pool in (*self.k_pages, *self.v_pages):
            pool[target] = pool[source]

    def _to_device(self, array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(array).to(self.k_pages[0].device)

    def __repr__(self) -> str:
        report = self.allocator.report()
        return f"PagedKVCache({len(self.k_pages)} layers, {len(self.allocator)} sequences, {report})"
