"""Checks the values of a paged call's arrays that are on the host, and finds where an append writes its tokens.

The functions take numpy arrays by the names of the arguments: None for an argument that the call does not have, and no
entry for an array that is elsewhere. Shapes and dtypes have been checked before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from attn_core.call import key_ranges
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.paged import rotary
from attn_core.paged.quantised.scales import check_scale_values, check_used_scales
from attn_core.paged.tables import check_slots, check_starts, check_values, positions_of, slots_of

TABLES = ("block_table", "seq_lens", "cu_seqlens_q")
SCALES = ("k_scales", "v_scales")
READ = (*TABLES, *SCALES, "key_ranges", "kv_starts")
"""The arrays of a paged call whose values are checked."""
Values = Mapping[str, np.ndarray | None]


class Written(NamedTuple):
    """The tokens that an append writes.

    Attributes:
        tokens: their index among the new ones.
        places: int64 ``[2, written]``: the page, and the offset in it, of each.
        positions: of each in its sequence; None without rotary, and if nothing on the host says them.
    """

    tokens: slice | np.ndarray
    places: np.ndarray
    positions: np.ndarray | None


def check_read(spec: AttentionSpec, max_len_q: int | None, values: Values) -> bool:
    """Checks the tables, key ranges, first keys and scales of a paged call. Returns whether it checked the tables.

    Args:
        max_len_q: the most queries of a sequence; None: as many as there are tokens.

    Raises:
        SpecError: naming the array, the wrong value and what was expected.
    """
    assert spec.paged is not None
    ranges, starts, lengths = (values.get(name) for name in ("key_ranges", "kv_starts", "seq_lens"))
    table, has_tables = values.get("block_table"), all(name in values for name in TABLES)
    if has_tables and table is not None and lengths is not None:
        check_values(spec.paged, spec.q_len, max_len_q, table, lengths, values["cu_seqlens_q"])
    if ranges is not None:
        key_ranges.check_values(ranges, spec.q_len)
    if starts is not None and lengths is not None:
        check_starts(starts, lengths)
    scales = {name: values.get(name) for name in SCALES}
    if has_tables and "kv_starts" in values and not any(each is None for each in scales.values()):
        check_scale_values(scales, spec.paged, table, lengths, starts)
    return has_tables


def places_of_append(tokens: int, pool: tuple[int, int], values: Values, max_positions: int | None) -> Written | None:
    """Checks the tables or slots of an append, its positions and its scales by page. None without values on the host.

    Args:
        tokens: of k and v. pool: the pages and their size.
        max_positions: the rows of cos and sin; None without rotary.

    Raises:
        SpecError: naming the array, the wrong value and what was expected.
    """
    slots, positions = values.get("slot_mapping"), values.get("positions")
    written: slice | np.ndarray
    if slots is not None:
        check_slot_values(slots, *pool)
        written = np.flatnonzero(slots >= 0)
        slots = slots[written].astype(np.int64)
    else:
        table, lengths = values.get("block_table"), values.get("seq_lens")
        if table is None or lengths is None or not values.keys() >= {"slot_mapping", *TABLES}:
            return None
        cu = values["cu_seqlens_q"]
        paged = PagedKV(num_pages=pool[0], page_size=pool[1], width=table.shape[1])
        check_values(paged, tokens, None, table, lengths, cu, writes=True)
        # An index assignment with a repeated slot would write either token, without an error; so slots are checked.
        slots = slots_of(table, lengths, np.arange(len(lengths) + 1) if cu is None else cu, pool[1])
        check_slots(slots)
        written = slice(len(slots))  # tokens behind the last offset belong to no sequence
        if max_positions is not None and positions is None and "positions" in values:
            _check_lengths_have_angles(lengths, cu, max_positions)
            positions = positions_of(lengths, cu)
    if positions is not None and max_positions is not None:
        positions = positions[written]
        rotary.check_position_values(positions, max_positions)
    scales = {name: array for name in SCALES if (array := values.get(name)) is not None and array.ndim == 2}
    check_used_scales(scales, slots, pool[1])
    return Written(written, np.stack(np.divmod(slots, pool[1])), positions)


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


def _check_lengths_have_angles(seq_lens: np.ndarray, cu_seqlens_q: np.ndarray | None, max_positions: int) -> None:
    """Raises SpecError for a sequence on the host whose new tokens lie behind the last row of cos and sin."""
    lengths = np.asarray(seq_lens)
    grows = np.ones(len(lengths), bool) if cu_seqlens_q is None else np.diff(cu_seqlens_q) > 0
    if (wrong := grows & (lengths > max_positions)).any():
        at = int(np.argmax(wrong))
        raise SpecError(
            f"seq_lens[{at}]={int(lengths[at])}: expected at most {max_positions} tokens, because cos and sin of "
            f"rotary have {max_positions} positions"
        )
