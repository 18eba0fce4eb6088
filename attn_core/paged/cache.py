"""The part of a paged cache that needs no framework: its sizes, its sequences, and their steps with their checks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from attn_core.call.kinds import check_size, is_host_int
from attn_core.call.spec import BITS, DTYPES, PagedKV, describe
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.paged.allocator import Copies, PageAllocator
from attn_core.paged.pools import PoolSizes
from attn_core.paged.step import Pages, Step, check_step, take_step

Array = TypeVar("Array")
MOST_LAYERS_AND_CHANNELS = 2**16
"""No model comes near, and a larger number would fill the memory before anything else complains."""


class SwappedOut(NamedTuple):
    """A sequence whose pages are in host memory.

    Attributes:
        pages: what ``_to_host`` returned.
        tokens: the tokens that are recorded of it.
    """

    pages: Any
    tokens: tuple[int, ...]


class CacheSizes(PoolSizes):
    """The sizes of a ``PagedKVCache``."""

    num_pages: int


class PagedCache(Generic[Array]):
    """The keys and values of all layers, in pages that the sequences share; frontends' ``PagedKVCache`` inherit it.

    Args:
        num_layers: the layers of the model. Every layer has a pool; all layers share one block table.
        num_pages, page_size: the size of each pool, which has room for ``num_pages * page_size`` tokens.
        kv_heads, head_dim, value_dim: the sizes of a token's key and value; value_dim is head_dim if None.
        dtype: of the pools.
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

    dtype: Any
    _append: Callable[..., tuple[Array, ...]]
    """The frontend's ``append_kv``."""

    def __init__(
        self,
        new: Callable[[tuple[int, ...], str], Array],
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: str,
        kv_dtype: str | None,
    ) -> None:
        """Takes the dtypes by name, and ``new``.

        new: returns a pool of a shape and dtype with zeros; or scales, which have one axis less, with ones.
        """
        dims = {"head_dim": head_dim, "value_dim": head_dim if value_dim is None else value_dim}
        for name, size in {"num_layers": num_layers, "kv_heads": kv_heads, **dims}.items():
            check_size(name, size, 1, MOST_LAYERS_AND_CHANNELS)
        if dtype not in DTYPES:
            raise DTypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype}")
        pool_dtype, channels = _stored_shape(kv_dtype, dtype, dims)
        self.allocator = PageAllocator(num_pages, page_size)
        self._swapped: dict[Hashable, SwappedOut] = {}
        scales = None if kv_dtype is None else "token"
        pool = PagedKV(num_pages=1, page_size=page_size, width=1, dtype=kv_dtype, scales=scales)
        self.stored = describe(pool, kv_heads, dims["head_dim"], dims["value_dim"], dtype)
        places = (num_pages, page_size, kv_heads)
        self.k_pages, self.v_pages = ([new((*places, dim), pool_dtype) for _ in range(num_layers)] for dim in channels)
        scaled = 0 if kv_dtype is None else num_layers  # pages that are not quantised have none
        self.k_scales, self.v_scales = ([new(places, "float32") for _ in range(scaled)] for _ in "kv")

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
            # In other pages now, so prompts must find their content anew.
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
        if not self._is_traced():  # a trace runs once, for all steps that its program will take
            check_step(self.allocator, step)

    def pages(self, layer: int, step: Step) -> Pages:
        """Returns a layer's pool, its scales and the tables of a step, as a layer's ``pages=`` takes them.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist.
        """
        return Pages(*self._pools(layer, step), step, **self._scales(layer))

    def update(
        self,
        layer: int,
        k: Array,
        v: Array,
        step: Step,
        *,
        rotary: tuple[Array, Array] | None = None,
        rotary_interleaved: bool = False,
    ) -> None:
        """Writes a layer's new keys and values, ``[tokens, kv_heads, dim]``, into the step's slots.

        Args:
            rotary, rotary_interleaved: as in ``append_kv``.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist. Nothing is written then.
        """
        k_pages, v_pages = self._pools(layer, step)
        turns = {"rotary": rotary, "rotary_interleaved": rotary_interleaved}
        results = self._append(k_pages, v_pages, k, v, **step.tables, **turns, **self._scales(layer))
        # JAX returns new arrays, and has deleted those that were here before.
        for arrays, new in zip(self._pool_lists(), results, strict=False):  # without scales there are fewer results
            arrays[layer] = new

    def _attend(self, attention: Callable[..., Any], layer: int, q: Array, step: Step, options: dict[str, Any]) -> Any:
        """Runs a frontend's ``paged_attention`` on a layer, with the options of its ``attend``."""
        k_pages, v_pages = self._pools(layer, step)
        tables = {**step.tables, "max_len_q": step.max_len_q}
        return attention(q, k_pages, v_pages, **tables, **options, **self._scales(layer))

    def _scales(self, layer: int) -> dict[str, Array]:
        """Returns a layer's scales as keyword arguments; empty if the pages are not quantised."""
        return {"k_scales": self.k_scales[layer], "v_scales": self.v_scales[layer]} if self.k_scales else {}

    def _pools(self, layer: int, step: Step) -> tuple[Array, Array]:
        """Runs ``check``, then returns a layer's pools of keys and of values.

        Raises:
            SpecError: as in ``check``, and for a layer that does not exist.
        """
        # A negative index would silently select a layer from the end.
        if not is_host_int(layer) or not 0 <= layer < len(self.k_pages):
            most = len(self.k_pages) - 1
            raise SpecError(f"layer={shown(layer)}: expected a number from 0 to {most}, one of the cache's layers")
        self.check(step)
        return self.k_pages[layer], self.v_pages[layer]

    def _pool_lists(self) -> tuple[list[Array], ...]:
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

    def _to_device(self, array: np.ndarray | None) -> Array | None:
        """Copies a table to the pools' device."""
        raise NotImplementedError

    def _is_traced(self) -> bool:
        """Returns whether a compiler traces the call; Python objects then have no values to check."""
        return False

    def __repr__(self) -> str:
        counts = f"{len(self.k_pages)} layers, {len(self.allocator)} sequences"
        return f"{type(self).__name__}({counts}, {self.stored}, {self.allocator.report()})"


PagedCache.__init__.__qualname__ = "PagedKVCache.__init__"  # the name that a TypeError of a missing size has


def _stored_shape(kv_dtype: str | None, dtype: str, dims: dict[str, int]) -> tuple[str, list[int]]:
    """Returns the dtype of the pools' arrays, and the channels that they have for keys and for values."""
    if kv_dtype is None:
        return dtype, [*dims.values()]
    if not isinstance(kv_dtype, str) or kv_dtype not in BITS:
        raise SpecError(f"kv_dtype={shown(kv_dtype)}: expected one of {', '.join(BITS)}, or None for the dtype itself")
    if kv_dtype != "int4":
        return kv_dtype, [*dims.values()]
    for name, dim in dims.items():
        if dim % 2:
            raise ShapeError(f"{name}={dim}: expected an even number, because int4 pages have two channels a byte")
    return "uint8", [dim // 2 for dim in dims.values()]
