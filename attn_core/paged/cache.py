"""The part of a paged cache that needs no framework: its sequences, their steps, and the checks of a step."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.paged.allocation.allocator import Copies, PageAllocator
from attn_core.paged.allocation.cache_sizes import check_layer
from attn_core.paged.step import Pages, Step, check_step, take_step


class SwappedOut(NamedTuple):
    """A sequence whose pages are in host memory.

    Attributes:
        pages: what ``_to_host`` returned.
        tokens: the tokens that are recorded of it.
    """

    pages: Any
    tokens: tuple[int, ...]


class PagedCache:
    """The sequences of a cache with one pool of pages for each layer; both frontends' ``PagedKVCache`` inherit it."""

    k_pages: list[Any]
    v_pages: list[Any]
    k_scales: list[Any]
    v_scales: list[Any]
    allocator: PageAllocator
    dtype: Any
    stored: str
    _swapped: dict[Hashable, SwappedOut]

    def add(self, name: Hashable, tokens: Sequence[int] = (), *, salt: Hashable = None) -> int:
        """Starts a sequence and returns how many tokens of its prompt are in its pages already.

        Args:
            tokens: the prompt's token ids. Its beginning is found by its content, if ``record`` was called for it; the
                sequence then shares those pages, and the next step begins behind them. At least one token is left.
            salt: as in ``PageAllocator.match``.

        Raises:
            SpecError: as ``PageAllocator.allocate_matching`` does.
        """
        return self.allocator.allocate_matching(name, tokens, salt=salt)

    def record(self, name: Hashable, tokens: Sequence[int]) -> None:
        """Says which tokens a sequence contains, from its beginning on, so that prompts find its full pages.

        Call it after ``update`` has written these tokens in every layer.

        Raises:
            SpecError: as ``PageAllocator.record`` does.
        """
        self.allocator.record(name, tokens)

    def fork(self, parent: Hashable, name: Hashable, tokens: int | None = None) -> None:
        """Starts a sequence that shares the parent's first ``tokens`` (all if None), without a copy.

        Raises:
            SpecError: as ``PageAllocator.fork`` does.
        """
        self.allocator.fork(parent, name, tokens)

    def free(self, name: Hashable) -> None:
        """Ends a sequence and frees its pages, or its host memory if it is swapped out."""
        self.allocator.free(name)
        self._swapped.pop(name, None)

    def swap_out(self, name: Hashable) -> None:
        """Copies a sequence's pages to host memory, pinned if the device is a GPU, and frees them.

        Until ``swap_in``, a step of the sequence is refused.

        Raises:
            SpecError: if the sequence shares pages, because they would not become free. Nothing changes then.
        """
        self.allocator.check_unshared(name)
        # Stored first: when the allocator frees the pages, they are safe.
        tokens = self.allocator.recorded(name)
        self._swapped[name] = SwappedOut(self._to_host(self.allocator.pages(name)), tokens)
        self.allocator.swap_out(name)

    def swap_in(self, name: Hashable) -> None:
        """Copies the pages of a sequence that is swapped out back into the pools.

        Raises:
            SpecError: if no such sequence is swapped out. PoolFullError: if the pool has too few free pages. Nothing
                changes then.
        """
        self.allocator.check_swapped(name)
        try:
            pages = self.allocator.swap_in(name)
            self._from_host(self._swapped[name].pages, pages)
            self.allocator.record(name, self._swapped[name].tokens)
        except BaseException:  # KeyboardInterrupt as well: the pages have no content yet
            if name in self.allocator:
                self.allocator.swap_out(name)
            raise
        del self._swapped[name]

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
        lists = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        return {name: arrays[layer] for name, arrays in lists.items() if arrays}

    def _pools(self, layer: int, step: Step) -> tuple[Any, Any]:
        """Runs ``check``, then returns a layer's pools of keys and of values.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist.
        """
        layer = check_layer(layer, len(self.k_pages))
        self.check(step)
        return self.k_pages[layer], self.v_pages[layer]

    def _pool_lists(self) -> tuple[list[Any], ...]:
        """Returns the lists of arrays whose first axis is the page: what belongs to a page is moved with it."""
        return self.k_pages, self.v_pages, self.k_scales, self.v_scales

    def _to_host(self, pages: tuple[int, ...]) -> Any:
        """Copies pages of every pool to host memory."""
        raise NotImplementedError

    def _from_host(self, there: Any, pages: tuple[int, ...]) -> None:
        """Copies what ``_to_host`` returned into these pages of the pools."""
        raise NotImplementedError

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
