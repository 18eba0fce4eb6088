"""What a cache of pages knows on the host: which tokens come next, and the tables of that step. No framework."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.errors import ShapeError, SpecError
from attn_core.paged.allocator import Copies, PageAllocator, PoolFullError
from attn_core.seq_info import is_host_int


class Step(NamedTuple):
    """The tables of one step, as ``paged_attention`` and ``append_kv`` take them.

    Attributes:
        block_table: int32 ``[batch, width]``; seq_lens: int32 ``[batch]``, with the step's tokens.
        cu_seqlens_q: int32 ``[batch + 1]``, the step's tokens; None where each sequence has one.
        max_len_q: host int, the most new tokens of a sequence.
    """

    block_table: Any
    seq_lens: Any
    cu_seqlens_q: Any
    max_len_q: int

    @property
    def tables(self) -> dict[str, Any]:
        """The keywords that ``append_kv`` takes."""
        return {"block_table": self.block_table, "seq_lens": self.seq_lens, "cu_seqlens_q": self.cu_seqlens_q}


class Pages(NamedTuple):
    """What a layer reads and writes in a step: its pool, ``[num_pages, page_size, kv_heads, dim]``, and the tables."""

    k: Any
    v: Any
    step: Step


def check_paged_layer(shape: tuple[int, ...], alignment: str, dropout: float, others: dict[str, Any]) -> None:
    """Checks what a layer is given beside ``pages=``.

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
            raise SpecError(f"{name}: expected None with pages, whose tables say what each token sees")
    if alignment != "bottom_right":
        raise SpecError(f"alignment={alignment!r}: expected bottom_right with pages")
    if dropout:
        raise SpecError(f"dropout_rate={dropout}: expected none with pages, which are for inference; switch it off")


def advance(
    allocator: PageAllocator, names: Sequence[Hashable], new: int | Sequence[int], width: int | None
) -> tuple[Step, Copies]:
    """Makes room for new tokens at the end of each sequence: the step's tables (numpy), and the pages to copy first.

    Args:
        new: how many tokens, for all alike or for each.

    Raises:
        SpecError: for a name that comes twice, counts that are not one for each, or too narrow a table.
        PoolFullError: when the pool has too few free pages for all of them.
        Nothing was changed then.
    """
    each: Any = [new] * len(names) if is_host_int(new) else new
    counts: list[int] = list(each)
    if len(counts) != len(names) or len(set(names)) != len(names):
        raise SpecError(f"names, new: expected a count for each of {len(names)} sequences, each named once, got {new}")
    needed = allocator.needed(dict(zip(names, counts, strict=True)))
    if needed > allocator.free_pages:
        raise PoolFullError(
            f"names: {needed} more pages of {allocator.page_size} tokens are needed for this step, and "
            f"{allocator.free_pages} of the pool's {allocator.num_pages} are free; free a sequence, or take fewer"
        )
    allocator.check_width(width, (allocator.length(name) + count for name, count in zip(names, counts, strict=True)))
    made = [allocator.extend(name, count) for name, count in zip(names, counts, strict=True)]
    copies = Copies(sum((c.source for c in made), ()), sum((c.target for c in made), ()))
    offsets = None if all(count == 1 for count in counts) else np.cumsum([0, *counts]).astype(np.int32)
    table, lengths = allocator.block_table(names, width), allocator.seq_lens(names)
    return Step(table, lengths, offsets, max(counts, default=0)), copies
