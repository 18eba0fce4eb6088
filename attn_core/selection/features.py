"""The kind of a call: the properties that change how fast a kernel works, whatever the size.

A cost model multiplies each size of a call (sizes.py) by a rate, and the kind changes the rates (cost_model.py).
"""

from __future__ import annotations

from typing import NamedTuple

from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec

FEW_QUERIES = 16
"""A row with at most this many queries is decoding: its speed depends on splitting the keys, not on tiling queries."""

SHORT = 64
"""A row with at most this many queries fills no tile: kernels differ in how they split its keys among processors."""

WIDTHS = (32, 64, 96, 128, 192, 256)
"""The widths that kernels are compiled for; a head_dim belongs to the first that is not smaller."""


NO_WINDOW = (None, None)


class Kind(NamedTuple):
    """The properties of a call that change how fast a kernel works, whatever the size.

    Attributes:
        training: whether the gradients are computed, too.
        width: the first of WIDTHS that both head dims fit in; the wider head dim if none.
        padded: whether kernels for WIDTHS pad the head dim.
        narrow_values: whether the values are narrower than the keys.
        dtype: of q, k and v.
        band: "full" (nothing is hidden, whatever the options are), "causal" or "window".
        decode: whether each row, or each packed document, has at most FEW_QUERIES queries.
        one_query: whether each row of a call without packed documents has one query.
        grouped, softcap, alibi, sinks, packed: whether the call has the feature.
        mask, bias: "" for none, "keys" if all queries share one row of it, else "scores".
        ragged: whether the rows of a mask or bias have no whole eights of keys, so that some kernels need a copy.
        short: whether each row, or each packed document, has more than FEW_QUERIES and at most SHORT queries.
    """

    training: bool
    width: int
    padded: bool
    narrow_values: bool
    dtype: str
    band: str
    decode: bool
    one_query: bool
    grouped: bool
    softcap: bool
    alibi: bool
    sinks: bool
    packed: bool
    mask: str
    bias: str
    ragged: bool
    short: bool


def kind_of_call(spec: AttentionSpec) -> Kind:
    """Returns the kind of a call."""
    wide = max(spec.head_dim, spec.value_dim)
    width = next((limit for limit in WIDTHS if wide <= limit), wide)
    queries, keys = longest(spec)
    return Kind(
        spec.needs_backward,
        width,
        wide != width,
        spec.value_dim < spec.head_dim,
        spec.dtype,
        _band(spec, queries, keys),
        queries <= FEW_QUERIES,
        spec.q_len == 1 and spec.documents is None,
        spec.num_heads != spec.num_kv_heads,
        spec.softcap is not None,
        spec.alibi_shape is not None,
        spec.sinks,
        spec.documents is not None,
        _rows(spec.mask_shape),
        _rows(spec.bias_shape),
        is_ragged(spec),
        FEW_QUERIES < queries <= SHORT,
    )


def is_ragged(spec: AttentionSpec) -> bool:
    """Returns whether the rows of a call's mask or bias have no whole eights of keys."""
    return spec.kv_len % 8 != 0 and not (spec.mask_shape is None and spec.bias_shape is None)


def longest(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the queries and keys of a row, or of the longest packed document."""
    if spec.documents is None:
        return spec.q_len, spec.kv_len
    return spec.max_len_q or spec.q_len, spec.max_len_k or spec.kv_len


def _band(spec: AttentionSpec, queries: int, keys: int) -> str:
    if not spec.causal and spec.window == NO_WINDOW:
        return "full"
    # A window longer than the row hides nothing, so the call costs as much as one without it.
    edge = band(spec, queries, keys)
    if edge.hides_nothing(queries, keys):
        return "full"
    return "causal" if spec.causal and edge.left is None else "window"


def _rows(shape: tuple[int, ...] | None) -> str:
    return "" if shape is None else "keys" if shape[2] == 1 else "scores"
