"""Where an append writes each new token: by the tables of its sequences, or by slots; and the token's position."""

from __future__ import annotations

from typing import Any

import numpy as np

from attn_core.call.arguments import ArrayFacts
from attn_core.errors import ShapeError, SpecError
from attn_core.paged import rotary
from attn_core.paged.tables import check_slots, check_table_types


def check_choice(
    tables: dict[str, Any], slot_mapping: Any, cos: Any, rotary_interleaved: Any = False, positions: Any = None
) -> None:
    """Checks which arguments of ``append_kv`` are passed together.

    Args:
        tables: block_table, seq_lens and cu_seqlens_q by name. cos: None without rotary.

    Raises:
        SpecError: naming the argument that is one too many, or missing.
    """
    rotary.check_interleaved("rotary_interleaved", rotary_interleaved)
    if cos is None and rotary_interleaved:
        raise SpecError("rotary_interleaved=True: expected False without rotary; pass rotary=(cos, sin)")
    if cos is None and positions is not None:
        raise SpecError("positions: expected None without rotary, because nothing else reads them")
    if slot_mapping is None:
        return
    for name, table in tables.items():
        if table is not None:
            raise SpecError(f"{name}: expected None with slot_mapping, which says where tokens are written; pass one")
    if cos is not None and positions is None:
        raise SpecError("positions: expected each token's position, got None; slot_mapping does not say it to rotary")


def check_slot_types(slot_mapping: ArrayFacts, tokens: int) -> None:
    """Raises DTypeError or ShapeError unless slots are whole numbers, one for each token."""
    check_table_types("slot_mapping", slot_mapping.dtype, slot_mapping.shape, (tokens,))


def check_tables_of_append(named: dict[str, ArrayFacts], tokens: int) -> None:
    """Checks the tables of ``append_kv``, by the names of its arguments, for so many new tokens."""
    table = named["block_table"]
    check_table_types("block_table", table.dtype, table.shape, ("batch", "width"))
    check_table_types("seq_lens", named["seq_lens"].dtype, named["seq_lens"].shape, (table.shape[0],))
    if "cu_seqlens_q" in named:
        offsets = named["cu_seqlens_q"]
        check_table_types("cu_seqlens_q", offsets.dtype, offsets.shape, (table.shape[0] + 1,))
    elif tokens != table.shape[0]:
        raise ShapeError(
            f"cu_seqlens_q: expected the new tokens' offsets, got None, which means one token for each of the "
            f"{table.shape[0]} sequences of block_table, but k has {tokens}"
        )


def check_slot_values(slots: np.ndarray, num_pages: int, page_size: int) -> None:
    """Checks slots on the host. Raises SpecError for one outside of the pool, or for two tokens in one slot."""
    if (wrong := (slots < -1) | (slots >= num_pages * page_size)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"slot_mapping[{at}]={int(slots[at])}: expected 0 to {num_pages * page_size - 1}, because the pool has "
            f"{num_pages} pages of {page_size}, or -1 for a token that is not written"
        )
    check_slots(slots, "slot_mapping")


def pages_and_offsets(slots: np.ndarray, page_size: int) -> np.ndarray:
    """Returns int32 ``[2, tokens]``: each slot's page and the offset in it; page -1 for a slot below 0."""
    # A pool may have more than 2**31 - 1 slots, but no more pages.
    return np.stack(np.divmod(slots.astype(np.int64), page_size)).astype(np.int32)


def check_lengths_have_angles(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray | None, max_positions: int) -> None:
    """Raises SpecError for a sequence on the host whose new tokens lie behind the last row of cos and sin."""
    lengths = np.asarray(seq_lens)
    grows = np.ones(len(lengths), bool) if cu_seqlens_q is None else np.diff(cu_seqlens_q) > 0
    if (wrong := grows & (lengths > max_positions)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"seq_lens[{at}]={int(lengths[at])}: expected at most {max_positions} tokens, because cos and sin of "
            f"rotary have {max_positions} positions"
        )
