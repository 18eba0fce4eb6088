"""The arithmetic of a call: how many operations it has, whether its logits may be large, and what dropout keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from attn_core.call.masks import Band, band
from attn_core.call.spec import AttentionSpec

BACKWARD_WORK = 2.5
"""The ratio of a backward's arithmetic to a forward's: five matrix products (S, dV, dP, dQ, dK) against two (S, O)."""


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


LARGE_LSE = 1024.0
"""The size of a log-sum-exp from which a backward does not compute weights as exp(logit - lse). In float32 they would
be wrong by 2^-14 there, and at 1e9 by a factor of the number of keys."""


def may_be_large(spec: AttentionSpec) -> bool:
    """Returns whether a bias, ALiBi or a score function may make all logits of a row large.

    Callers hide keys by large negative biases, slopes or scores. ALiBi does it if a mask hides the keys near a query.
    """
    return spec.bias_shape is not None or spec.alibi_shape is not None or spec.score_mod is not None


_WORD = 0xFFFFFFFF


def dropout_keeps(rng: Any, indices: tuple[Any, ...], dropout: float, word: Callable[[int], Any] = int) -> Any:
    """Returns a boolean array, False where a weight is dropped. It is True with probability ``1 - dropout``.

    The mask is a pure function of (seed, batch, head, row, column). numpy, torch and JAX compute the same integers, so
    a backward needs no stored mask and the reference can check it.

    Args:
        rng: two integer words (seed, offset); only their low 32 bits count.
        indices: integer arrays (batch, head, row, column) that broadcast against each other.
        dropout: the probability of dropping.
        word: converts a constant to the arrays' type; ``jnp.uint32`` if 32-bit arithmetic wraps by itself.
    """
    hashed = _mix(rng[0] & word(_WORD), word) + (rng[1] & word(_WORD))
    for index in indices:  # 0x9E3779B9 is 2^32 / golden ratio, which spreads consecutive indices over all bits
        hashed = _mix((hashed + index * word(0x9E3779B9)) & word(_WORD), word)
    # Integers compare alike in every framework. The limit is clamped, because a probability close to 1 rounds
    # to 2^32, which has no place in 32 bits.
    return hashed >= word(min(round(dropout * 2**32), _WORD))


def _mix(value: Any, word: Callable[[int], Any]) -> Any:
    """Applies "lowbias32", the 32-bit finaliser of Chris Wellons' hash-prospector (bias 0.17).

    The masks make 64-bit integers (numpy, torch) behave as 32-bit ones that wrap.
    """
    value = value & word(_WORD)
    value = value ^ (value >> word(16))
    value = (value * word(0x7FEB352D)) & word(_WORD)
    value = value ^ (value >> word(15))
    value = (value * word(0x846CA68B)) & word(_WORD)
    return value ^ (value >> word(16))
