"""The steps of a paged cache: reserves slots for new tokens, builds the tables of the step, and checks their validity.

Plain Python and numpy; the frontends copy the tables to a device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.kinds import check_names, is_host_int, listed
from attn_core.errors import ShapeError, SpecError, shown
from attn_core.paged.allocator import Copies, PageAllocator, PoolFullError


class Step(NamedTuple):
    """The tables of one step, as ``paged_attention`` and ``append_kv`` take them.

    Attributes:
        block_table: int32 ``[batch, width]``: each sequence's pages.
        seq_lens: int32 ``[batch]``: tokens of each sequence, including the new ones.
        cu_seqlens_q: int32 ``[batch + 1]``, the offsets of the new tokens; None if each sequence has one.
        max_len_q: host int, the most new tokens of a sequence.
    """

    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any
    max_len_q: int

    @property
    def tables(self) -> dict[str, Any]:
        """The tables as keyword arguments of ``append_kv`` and ``paged_attention``."""
        return {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}


class Pages(NamedTuple):
    """A layer's pool, ``[num_pages, page_size, kv_heads, dim]``, the tables of a step, and scales if it is quantised.

    ``PagedKVCache.pages`` returns it. The scales are those of ``append_kv``.
    """

    k: Any
    v: Any
    step: Step
    k_scales: Any = None
    v_scales: Any = None

    @property
    def scales(self) -> dict[str, Any]:
        """The scales as keyword arguments of ``append_kv`` and ``paged_attention``; empty if there are none."""
        scales = {"k_scales": self.k_scales, "v_scales": self.v_scales}
        return {name: array for name, array in scales.items() if array is not None}


def check_paged_layer(shape: tuple[int, ...], alignment: str, dropout: float, others: Mapping[str, object]) -> None:
    """Checks a layer's other arguments if ``pages=`` is passed.

    Args:
        shape: of x.
        others: the other arguments of the call by name; all must be None.

    Raises:
        ShapeError, SpecError: naming the argument.
    """
    if len(shape) != 2:
        raise ShapeError(f"x: expected [tokens, features] with pages, the new tokens end to end, got {list(shape)}")
    for name, value in others.items():
        if value is not None:
            raise SpecError(f"{name}: expected None with pages, because their tables define what each token sees")
    if alignment != "bottom_right":
        raise SpecError(f"alignment={shown(alignment)}: expected bottom_right with pages")
    if dropout:
        raise SpecError(f"dropout_rate={dropout}: expected 0 with pages, because they are for inference; switch it off")


class _Ticket(NamedTuple):
    """The origin of a step: its sequences, and the time, as the allocator counts it."""

    table: weakref.ref[Any]
    allocator: PageAllocator
    names: tuple[Hashable, ...]
    time: int


_TICKETS: dict[int, _Ticket] = {}
"""Tickets by the id of a step's block table, as long as the table lives. A ticket is not a field of the step, because
it differs in every step, and compilers would trace again for every new value."""


def take_step(
    allocator: PageAllocator,
    names: Sequence[Hashable],
    new: int | Sequence[int],
    width: int | None,
    copy: Callable[[Copies], None],
    there: Callable[[np.ndarray | None], Any],
) -> Step:
    """Takes the next step of a cache and registers it for ``check_step``. On an error the allocator is unchanged.

    Args:
        names: the sequences, each once.
        new: the number of new tokens, one for all sequences or one for each.
        width: columns of the table; as many as needed if None.
        copy: copies pages of the pools; called only if there are any to copy.
        there: copies a table to the pools' device.

    Raises:
        SpecError: for a repeated name, a wrong number of counts, or too narrow a table.
        PoolFullError: if the pool has too few free pages for all sequences together.
    """
    named = check_names("names", names)
    expected = "a number of tokens, or a list of one for each"
    each: Any = [new] * len(named) if is_host_int(new) else listed("new", new, expected)
    # The counts become a dict, in which a repeated name would lose one of its counts.
    if len(each) != len(named) or len(set(named)) != len(named):
        raise SpecError(f"names, new: expected a count for each of {len(named)} sequences, each named once, got {new}")
    growth = allocator.grow(dict(zip(named, each, strict=True)))
    if growth.needed > allocator.free_pages:
        raise PoolFullError(
            f"names: this step needs {growth.needed} more pages of {allocator.page_size} tokens, but only "
            f"{allocator.free_pages} of the pool's {allocator.num_pages} are free; free a sequence, or step fewer"
        )
    records = list(growth.records.values())
    table, lengths = allocator.table_of(records, width), np.array([held.length for held in records], np.int32)
    # No offsets means one query each, which is a case of its own for kernels (``one_query_each``).
    offsets = None if all([count == 1 for count in each]) else np.cumsum([0, *each]).astype(np.int32)
    # The allocator changes last, so a step that fails or is interrupted leaves the pool as it was.
    if growth.copies.source:
        allocator.evict(growth.copies.target)
        copy(growth.copies)
    step = Step(there(table), there(lengths), there(offsets), int(max(each, default=0)))
    allocator.commit(growth)
    # The id is unique only while the table lives, so the ticket is removed with it; check_step also compares the table.
    key = id(step.block_table)
    block_table = weakref.ref(step.block_table, lambda _: _TICKETS.pop(key, None))
    _TICKETS[key] = _Ticket(block_table, allocator, named, allocator.now)
    return step


def check_step(allocator: PageAllocator, step: Step) -> None:
    """Checks that a step's tables still match its sequences. Steps that were not taken by ``take_step`` pass unchecked.

    Raises:
        SpecError: naming the sequence that was freed, forked or stepped again since then; or if ``step`` is no Step.
    """
    if not isinstance(step, Step):
        raise SpecError(f"step: expected a result of cache.step(), got {type(step).__name__}")
    ticket = _TICKETS.get(id(step.block_table))
    if ticket is None or ticket.table() is not step.block_table:
        return
    if ticket.allocator is not allocator:
        raise SpecError("step: expected a step of this cache, got a step of another cache")
    changed = allocator.changed_since(ticket.time, ticket.names)
    if changed is not None:
        name, what = changed
        raise SpecError(
            f"step: sequence {name!r} was {what} after this step was taken, so its pages may be another sequence's; "
            "use a step in every layer first, then free, fork or step its sequences"
        )
