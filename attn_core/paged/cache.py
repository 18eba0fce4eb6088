"""The part of a paged cache that needs no framework: its sequences, their steps, and the checks of a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from attn_core.paged.allocator import Copies, PageAllocator
from attn_core.paged.arguments import check_layer
from attn_core.paged.step import Pages, Step, check_step, take_step


class PagedCache:
    """The sequences of a cache with one pool of pages for each layer; both frontends' ``PagedKVCache`` inherit it."""

    k_pages: list[Any]
    v_pages: list[Any]
    k_scales: list[Any]
    v_scales: list[Any]
    allocator: PageAllocator
    dtype: Any
    stored: str

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
            width: columns of the table. A fixed width keeps shapes equal in every step, so compiled code is not traced
                again, and a CUDA graph can replay.

        Raises:
            PoolFullError: if the pool has too few free pages. SpecError: for invalid arguments. Both leave the cache
                unchanged.
        """
        return take_step(self.allocator, names, new, width, self._copy, self._to_device)

    def check(self, step: Step) -> None:
        """Checks that a step's tables are still valid. ``update`` and ``attend`` call it; call it before ``append_kv``.

        Raises:
            SpecError: naming the sequence that was freed, forked or stepped again after the step was taken.
        """
        if not self._is_traced():
            check_step(self.allocator, step)

    def pages(self, layer: int, step: Step) -> Pages:
        """Returns a layer's pool, its scales and the tables of a step, as a layer's ``pages=`` takes them.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist.
        """
        return Pages(*self._pools(layer, step), step, **self._scales(layer))

    def _scales(self, layer: int) -> dict[str, Any]:
        """Returns a layer's scales as keyword arguments; empty if the pages are not quantised."""
        return {"k_scales": self.k_scales[layer], "v_scales": self.v_scales[layer]} if self.k_scales else {}

    def _pools(self, layer: int, step: Step) -> tuple[Any, Any]:
        """Runs ``check``, then returns a layer's pools of keys and of values.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist.
        """
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        return self.k_pages[layer], self.v_pages[layer]

    def _copy(self, copies: Copies) -> None:
        """Copies pages in all pools."""
        raise NotImplementedError

    def _to_device(self, array: np.ndarray | None) -> Any:
        """Copies a table to the pools' device."""
        raise NotImplementedError

    def _is_traced(self) -> bool:
        """Returns whether a compiler traces the call; Python objects then have no values to check."""
        return False

    def __repr__(self) -> str:
        counts = f"{len(self.k_pages)} layers, {len(self.allocator)} sequences"
        return f"{type(self).__name__}({counts}, {self.stored}, {self.allocator.report()})"
