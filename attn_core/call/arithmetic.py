"""Counts the arithmetic of a call from its spec."""

from __future__ import annotations

from collections.abc import Iterable

from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec

BACKWARD_WORK = 2.5
"""The ratio of a backward's arithmetic to a forward's: five matrix products (S, dV, dP, dQ, dK) against two (S, O)."""


def flops(spec: AttentionSpec, lengths: Iterable[int] | None = None) -> float:
    """Counts the floating-point operations of a call's matrix products, without pairs that the band hides.

    ``2 * batch * heads * pairs * (head_dim + value_dim)`` forward; 3.5 times that if a backward is needed.

    Args:
        lengths: the tokens of each packed document, if known (the same for queries and keys).
    """
    forward = 2.0 * spec.batch * spec.num_heads * pairs(spec, lengths) * (spec.head_dim + spec.value_dim)
    return forward * (1 + BACKWARD_WORK) if spec.needs_backward else forward


def pairs(spec: AttentionSpec, lengths: Iterable[int] | None = None) -> float:
    """Counts the (query, key) pairs inside the band for one head of one row, ignoring masks.

    Without ``lengths``, every packed document is assumed to be as long as the longest.
    """
    if not spec.packed:
        return banded_pairs(band(spec), spec.q_len, spec.kv_len)
    if lengths is not None:
        return sum(banded_pairs(band(spec, length, length), length, length) for length in lengths)
    longest_q, longest_k = spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len
    each = banded_pairs(band(spec, longest_q, longest_k), longest_q, longest_k)
    # As many such documents as the row has tokens for. A row without tokens has a longest document of 0.
    return each * spec.q_len / max(1, longest_q)


def banded_pairs(edge: Band, q_len: int, kv_len: int) -> int:
    """Counts the (query, key) pairs of a ``q_len`` by ``kv_len`` rectangle that lie inside a band."""
    # Plus 1, because ``right`` is inclusive and the end of a range is not.
    stops = q_len * kv_len if edge.right is None else _clipped_sum(edge.offset + edge.right + 1, q_len, kv_len)
    starts = 0 if edge.left is None else _clipped_sum(edge.offset - edge.left, q_len, kv_len)
    return stops - starts


def _clipped_sum(first: int, count: int, top: int) -> int:
    """Returns the sum of min(max(x, 0), top) over ``count`` consecutive integers x, starting at ``first``.

    A row's range of keys starts and ends at such clipped values, so two sums count all pairs without a loop over rows.
    """

    def below(stop: int) -> int:  # the sum over 0 <= x < stop
        ramp = max(0, min(stop, top))
        return ramp * (ramp - 1) // 2 + max(0, stop - top) * top

    return below(first + count) - below(first)
