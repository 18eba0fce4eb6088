"""The order of the axes of q, k, v and the output, and shapes that suggest the other order."""

from __future__ import annotations

import warnings
from typing import Any, Literal, get_args

from attn_core.call.seq_info import is_number
from attn_core.errors import LayoutWarning, SpecError, shown

Layout = Literal["bshd", "bhsd"]
"""``[batch, seq, heads, head_dim]`` or ``[batch, heads, seq, head_dim]``; packed the same without the batch."""

MOST_HEADS = 128
"""Models have no more query heads, so a longer axis likely counts tokens."""

HINT = "if q, k and v are [batch, heads, seq, head_dim], pass layout='bhsd'"


def check_layout(layout: Any) -> Layout:
    """Returns one of the two layouts. Raises SpecError for any other value."""
    if not isinstance(layout, str) or layout not in get_args(Layout):
        raise SpecError(
            f"layout={shown(layout)}: expected 'bshd', which is [batch, seq, heads, head_dim], or 'bhsd', which is "
            "[batch, heads, seq, head_dim]"
        )
    return layout  # type: ignore[return-value]


def fits_heads_first(q: tuple[Any, ...], k: tuple[Any, ...]) -> bool:
    """Returns whether two shapes of four axes also describe a call if heads come before the sequence."""
    return all(map(is_number, (*q, *k))) and min(*q, *k) > 0 and q[1] % k[1] == 0


def warn_of_heads_first(q: tuple[Any, ...], k: tuple[Any, ...]) -> None:
    """Warns if the shapes of q and k, ``[batch, seq, heads, head_dim]``, are likelier those of heads first.

    They are if there are as many key/value heads as query heads and more heads than queries, and either more heads than
    models have, or fewer keys than queries, which is grouped heads if the first axes are heads.
    """
    if not fits_heads_first(q, k) or q[2] != k[2] or q[2] <= q[1]:
        return
    if q[2] > MOST_HEADS or q[1] > k[1]:
        warnings.warn(
            f"q, k: the shapes {list(q)} and {list(k)} are read as [batch, seq, heads, head_dim], which is {q[1]} "
            f"queries and {k[1]} keys of {q[2]} heads; {HINT}",
            LayoutWarning,
            stacklevel=2,
        )
