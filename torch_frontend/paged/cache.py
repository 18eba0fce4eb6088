"""PagedKVCache: pool, allocator and layers of a model's keys and values in one thing."""

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
    """Keys and values of all layers, in pages that the sequences share.

    Args:
        num_layers: of the model. Every layer has a pool; one table serves them all.
        num_pages, page_size: of each pool: ``num_pages * page_size`` tokens fit in.
        kv_heads, head_dim: of a token's key; value_dim: of its value, head_dim when None.
        dtype, device: of the pools.

    Attributes:
        k_pages, v_pages: a pool for each layer, ``[num_pages, page_size, kv_heads, dim]``.
        allocator: which pages belong to which sequence; ``allocator.report()`` says how full the pools are.

    A step of a model: ``step`` once for the sequences that go on, then in every layer ``update`` and ``attend``.
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
        """Starts a sequence that shares the parent's first ``tokens`` (all when None), without a copy."""
        self.allocator.fork(parent, name, tokens)

    def free(self, name: Hashable) -> None:
        """Ends a sequence; its pages serve others."""
        self.allocator.free(name)

    def step(self, names: Sequence[Hashable], new: int | Sequence[int] = 1, *, width: int | None = None) -> Step:
        """Makes room for new tokens of each sequence and says where they go: the tables of this step, on the device.

        Pages that a sequence shares with others are copied before it writes to them.

        Args:
            names: the sequences, in the order of their tokens in q, k and v.
            new: how many tokens, for all alike or for each.
            width: columns of the table; fixed, shapes stay the same from step to step (compiled code, CUDA graphs).

        Raises:
            PoolFullError: when the pool has too few free pages; SpecError: for arguments that describe no step. Nothing
                was changed then.
        """
        return take_step(self.allocator, names, new, width, self._copy, self._there)

    def update(self, layer: int, k: Tensor, v: Tensor, step: Step) -> None:
        """Writes a layer's new keys and values, ``[tokens, kv_heads, dim]``, where the step says.

        Raises:
            SpecError: as ``check`` does, and for a layer that is not there. Nothing was written then.
        """
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        append_kv(self.k_pages[layer], self.v_pages[layer], k, v, **step.tables)

    def attend(self, layer: int, q: Tensor, step: Step, **options: Any) -> Any:
        """``paged_attention`` of a layer's queries ``[tokens, heads, head_dim]`` with its options, after ``check``."""
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        k_pages, v_pages = self.k_pages[layer], self.v_pages[layer]
        return paged_attention(q, k_pages, v_pages, **step.tables, max_len_q=step.max_len_q, **options)

    def check(self, step: Step) -> None:
        """Checks that a step's tables still hold. ``update`` and ``attend`` do; before ``append_kv`` call it yourself.

        Raises:
            SpecError: naming the sequence that was freed, forked or stepped again after the step was taken.
        """
        if not torch.compiler.is_compiling():
            check_step(self.allocator, step)

    def _copy(self, copies: Copies) -> None:
        source, target = (torch.tensor(pages, device=self.k_pages[0].device) for pages in copies)
        for pool in (*self.k_pages, *self.v_pages):
            pool[target] = pool[source]

    def _there(self, array: np.ndarray | None) -> Any:
        return None if array is None else torch.from_numpy(array).to(self.k_pages[0].device)

    def __repr__(self) -> str:
        report = self.allocator.report()
        return f"PagedKVCache({len(self.k_pages)} layers, {len(self.allocator)} sequences, {report})"
