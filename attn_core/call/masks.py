"""Visibility as data: the band of causal and window, packed documents, key ranges, arbitrary masks.

This is the definition of what is visible. ``attn_core.masks`` builds key ranges for the masks of usual models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from attn_core.call.functions import seen_by_function
from attn_core.call.key_ranges import visible_in_ranges
from attn_core.call.kinds import is_number
from attn_core.call.options import Options
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Array
from attn_core.expressions import recognition
from attn_core.expressions.tree import Expression

FAR = 2**30
"""A distance beyond the end of any row. Kernels add positions to it in int32, so it must stay far below 2**31."""


class Band(NamedTuple):
    """Causal and window combined: key ``j`` is visible to query ``i`` iff ``-left <= j - (i + offset) <= right``.

    None is unbounded. The methods take ints or integer arrays of any framework.
    """

    left: int | None
    right: int | None
    offset: int

    def sides(self) -> tuple[int, int]:
        """Returns left and right for kernels that take numbers alone: FAR for a side that is open."""
        return FAR if self.left is None else self.left, FAR if self.right is None else self.right

    def contains(self, rows: Any, columns: Any) -> Any:
        """Returns whether queries ``rows`` see keys ``columns``, which broadcast; plain True if unbounded."""
        distance = columns - (rows + self.offset)
        inside: Any = True
        if self.left is not None:
            inside = distance >= -self.left
        if self.right is not None:
            inside = (distance <= self.right) & inside
        return inside

    def keys_of(self, first_row: int, last_row: int, kv_len: int) -> tuple[int, int]:
        """Returns the half-open range of keys that some row in ``[first_row, last_row]`` sees; ``(0, 0)`` if none."""
        start = 0 if self.left is None else max(0, first_row + self.offset - self.left)
        stop = kv_len if self.right is None else min(kv_len, last_row + self.offset + self.right + 1)
        return (start, stop) if start < stop else (0, 0)

    def hides_nothing(self, q_len: int, kv_len: int) -> bool:
        """Returns whether each of ``q_len`` queries sees each of ``kv_len`` keys."""
        if 0 in (q_len, kv_len):
            return True
        # The largest distances: of the first query from the last key, and of the last query from the first key.
        after, before = kv_len - 1 - self.offset, q_len - 1 + self.offset
        return (self.left is None or before <= self.left) and (self.right is None or after <= self.right)

    def empties_a_row(self, q_len: int, kv_len: int) -> bool:
        """Returns whether some query sees no key at all."""
        # A band moves with the row, so if it misses all keys anywhere, it does so in the first or the last row.
        ends = (0, q_len - 1) if q_len else ()
        ranges = (self.keys_of(row, row, kv_len) for row in ends)
        return any(start == stop for start, stop in ranges)


def band(spec: AttentionSpec, q_len: int | None = None, kv_len: int | None = None) -> Band:
    """Returns the band of a spec, or of one of its documents if that document's lengths are passed."""
    left, right = spec.window
    if spec.causal:  # causal is a window that ends at the diagonal
        right = 0 if right is None else min(right, 0)
    queries = spec.q_len if q_len is None else q_len
    keys = spec.kv_len if kv_len is None else kv_len
    # Clamp huge distances: beyond the row they hide nothing more, and kernels add positions to them in int32.
    reach = FAR if spec.symbolic else spec.q_len + spec.kv_len
    left = None if left is None else min(left, reach)
    right = None if right is None else min(right, reach)
    return Band(left, right, keys - queries if spec.alignment == "bottom_right" else 0)


def without_idle_sides(options: Options, q_len: int, kv_len: int) -> Options:
    """Returns the options of a dense call without the sides of the window that hide no key; ``(None, 0)`` is causal.

    So a model with sliding windows runs its short prompts on any kernel, also on one that has no windows. A call with
    ``invariant`` keeps its window, because the kernel of a row must not depend on its length.

    Args:
        options: with the window as a pair.
        q_len, kv_len: ints; the options stay as they are if one is a symbol.
    """
    left, right = options.window  # type: ignore[misc]
    if (left is None and right is None) or not (is_number(q_len) and is_number(kv_len)):
        return options
    offset = kv_len - q_len if options.alignment == "bottom_right" else 0
    by_length = options.invariant is None
    if left is not None and by_length and left >= q_len - 1 + offset:  # the last query sees the first key
        left = None
    # The first query sees the last key; or nothing but causal, which is the tighter bound, is left of the window.
    sees_all = right is not None and by_length and right >= kv_len - 1 - offset
    if right is not None and (sees_all or (options.causal and left is None)):
        right = None
    if left is None and right == 0:
        return options._replace(causal=True, window=(None, None))
    return options._replace(window=(left, right))


def with_band_of_function(options: Options, q_len: int, kv_len: int, *, anchored: bool, has_aux: bool) -> Options:
    """Returns the options of a dense call, in which causal and window say what terms of the mask function said.

    Any kernel then runs ``q >= k``, and one that takes functions computes fewer terms. A call with ``invariant`` keeps
    its function, because what is recognised depends on the lengths.

    Args:
        options: with the window as a pair.
        q_len, kv_len: ints; the options stay as they are if one is a symbol.
        anchored: whether the call has slopes, which its alignment anchors, too.
        has_aux: whether it has aux arrays, which it cannot have without a function.
    """
    if options.mask_mod is None or options.invariant is not None or not (is_number(q_len) and is_number(kv_len)):
        return options
    found = recognition.split(options.mask_mod)
    is_unused = has_aux and found.rest is None and options.score_mod is None
    if found.least is found.most is None or is_unused:
        return options
    is_free = not (options.causal or anchored or options.window != (None, None))
    alignments = [options.alignment]
    if is_free and q_len != kv_len:
        alignments += ["top_left", "bottom_right"]
    left, right = options.window  # type: ignore[misc]
    ways: list[Options] = []
    for alignment in alignments:
        offset = kv_len - q_len if alignment == "bottom_right" else 0
        before = left if found.least is None else offset - found.least
        after = right if found.most is None else found.most - offset
        if (before or 0) < 0 or (after or 0) < 0:  # a window has no such distances
            continue
        sides = _nearest(left, before), _nearest(right, after)
        ways.append(options._replace(alignment=alignment, window=sides, mask_mod=found.rest))
    # More kernels have causal than have any other band.
    return min(ways, key=lambda way: way.window[1] != 0, default=options)  # type: ignore[index]


def recognised(function: Expression | None, spec: AttentionSpec) -> str | None:
    """Returns in words what a spec says in place of terms of the call's mask function; None if it says nothing."""
    if function is None or function == spec.mask_mod:
        return None
    band = "causal" if spec.causal else f"window={spec.window}" if spec.window != (None, None) else "no mask"
    rest = "" if spec.mask_mod is None else ", and other terms, which stay a function"
    return f"a band, which runs as {band}{rest}"


def _nearest(*distances: int | None) -> int | None:
    return min((distance for distance in distances if distance is not None), default=None)


def document_of(cu_seqlens: np.ndarray, tokens: int) -> np.ndarray:
    """Returns the index of each token's document; the number of documents for tokens after the last."""
    return np.searchsorted(np.asarray(cu_seqlens)[1:], np.arange(tokens), side="right")


def positions(
    spec: AttentionSpec, cu_seqlens_q: Array | None = None, cu_seqlens_k: Array | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns positions within the documents: ``(query positions + offset, key positions)``.

    The offset puts a query at the position of the key on its diagonal.
    """
    if not spec.packed:
        return np.arange(spec.q_len) + band(spec).offset, np.arange(spec.kv_len)
    cu_q, cu_k = (np.asarray(cu, dtype=np.int64) for cu in (cu_seqlens_q, cu_seqlens_k))
    of_query, of_key = document_of(cu_q, spec.q_len), document_of(cu_k, spec.kv_len)
    offsets = np.diff(cu_k) - np.diff(cu_q) if spec.alignment == "bottom_right" else np.zeros(len(cu_q) - 1, np.int64)
    offsets = np.append(offsets, 0)  # for tokens after the last document, whose document index is len(cu_q) - 1
    return np.arange(spec.q_len) - cu_q[of_query] + offsets[of_query], np.arange(spec.kv_len) - cu_k[of_key]


def visible(
    spec: AttentionSpec,
    mask: Array | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_ranges: Array | None = None,
    aux: Sequence[Array] = (),
) -> np.ndarray:
    """Returns the visible (query, key) pairs as a boolean array ``[batch or 1, heads or 1, q_len, kv_len]``.

    This is the definition of visibility. The mask probe compares every backend's mask with it.
    """
    rows, columns = positions(spec, cu_seqlens_q, cu_seqlens_k)
    seen = np.ones((spec.q_len, spec.kv_len), bool)
    # The positions of the queries already include the offset.
    seen &= band(spec)._replace(offset=0).contains(rows[:, None], columns[None, :])
    if spec.packed:
        of_query, of_key = document_of(cu_seqlens_q, spec.q_len), document_of(cu_seqlens_k, spec.kv_len)
        # The second condition hides padding: tokens after the last document would match each other in the first.
        seen &= (of_query[:, None] == of_key[None, :]) & (of_query[:, None] < len(np.asarray(cu_seqlens_q)) - 1)
    full = seen[None, None]
    if key_ranges is not None:
        full = full & visible_in_ranges(key_ranges, spec.q_len, spec.num_heads)
    if spec.mask_mod is not None:
        full = full & seen_by_function(spec, aux)
    return full if mask is None else full & np.asarray(mask, bool)
