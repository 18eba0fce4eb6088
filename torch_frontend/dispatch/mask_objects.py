"""Masks that are objects of other libraries: read into the options of a call.

The meaning of xformers' classes, with W = ``_window_size`` keys, the query's own included:

    LowerTriangularMask, BlockDiagonalCausalMask        query i sees key j <= i, in each block
    ...FromBottomRight...                               the last query sees the last key, in each block
    ..._window_size=W                                   causal, and the last W keys
    window_left, window_right                           inclusive distances from the bottom-right diagonal

A class is read only under its full name. A subclass may mean anything, so it is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from attn_core.call.hints import MASKS, Meaning
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError, SpecError

_XFORMERS = ("xformers.ops.fmha.attn_bias", "mslk.attention.fmha.attn_bias")  # the newest xformers has them from mslk


def is_object(*tables: object) -> bool:
    """Returns whether a mask or a bias is an object that ``as_options`` reads."""
    return any([_is_known(type(table)) for table in tables])


def _is_known(kind: type) -> bool:
    if kind.__name__ == "CausalBias":
        return kind.__module__ == "torch.nn.attention.bias"
    return kind.__module__ in _XFORMERS and isinstance(MASKS.get(kind.__name__), Meaning)


class Visible(NamedTuple):
    """The options of a call that say what is visible."""

    causal: Any = False
    alignment: Any = "bottom_right"
    window: Any = None
    mask: Any = None
    bias: Any = None
    seq_info: Any = None


def as_options(visible: Visible, q_len: int | None, kv_len: int | None, device: torch.device) -> Visible:
    """Returns the options of a call with those that its mask object means in the place of the object.

    Args:
        visible: options of which the mask or the bias is such an object.
        q_len, kv_len: the lengths of the rows; None if they are unknown. device: that of q.

    Raises:
        SpecError, ShapeError: if the options say the same as the object, or contradict it, or if the object belongs to
            rows of other lengths.
    """
    names = [name for name in ("mask", "bias") if is_object(getattr(visible, name))]
    if len(names) == 2:
        raise SpecError("mask and bias: expected one object that says what is visible, got two; pass one")
    value = getattr(visible, names[0])
    shown = f"{names[0]}: {type(value).__name__}"
    meaning = _meaning(value, shown, q_len, kv_len)
    _check_free(shown, meaning, visible)
    visible = visible._replace(mask=None) if names[0] == "mask" else visible._replace(bias=None)
    # One object may mean several options: a bias, a window, and documents.
    if meaning.bias:
        if visible.bias is not None:
            raise SpecError(f"{shown} with bias=: expected one bias, because the object has one; add the two")
        visible = visible._replace(bias=value._bias)
    if meaning.window:
        # A causal object counts the keys that a query sees, self included; the other one has our distances.
        window = (value._window_size - 1, 0) if meaning.causal else (value.window_left, value.window_right)
        visible = visible._replace(window=window)
    if meaning.documents:
        visible = visible._replace(seq_info=_documents(value, device))
    return visible._replace(
        causal=meaning.causal or visible.causal,
        alignment=visible.alignment if meaning.alignment is None else meaning.alignment,
    )


def _meaning(value: Any, shown: str, q_len: int | None, kv_len: int | None) -> Meaning:
    """Returns the meaning of an object. torch's CausalBias carries the lengths of its rows, which are checked."""
    known = MASKS[type(value).__name__]
    if isinstance(known, Meaning):
        return known
    if q_len is not None and (value.seq_len_q != q_len or value.seq_len_kv != kv_len):
        raise ShapeError(
            f"{shown}: expected one of {q_len} queries and {kv_len} keys, got {value.seq_len_q} and {value.seq_len_kv}"
        )
    return Meaning(True, "top_left" if value.variant.name == "UPPER_LEFT" else "bottom_right")


def _check_free(shown: str, meaning: Meaning, visible: Visible) -> None:
    """Raises SpecError for options that the object has as well."""
    repeated = {
        "causal=True": meaning.causal and visible.causal is True,
        "window=": meaning.window and visible.window is not None,
        # An object for whole rows has one diagonal, documents have one each.
        "seq_info=": visible.seq_info is not None,
        "alignment='top_left'": meaning.alignment == "bottom_right" and visible.alignment == "top_left",
    }
    for option, clashes in repeated.items():
        if clashes:
            raise SpecError(f"{shown} with {option}: expected one of the two, because both say what is visible")


def _documents(value: Any, device: torch.device) -> SeqInfo:
    """Returns the blocks of a mask. Offsets on q's device are used as they are; else those on the host."""
    sides = (value.q_seqinfo, value.k_seqinfo)
    if all([getattr(side.seqstart, "device", None) == device for side in sides]):  # no copy, and no wait
        offsets = [side.seqstart for side in sides]
    else:
        queries = np.asarray(sides[0].seqstart_py, np.int32)
        offsets = [queries, queries if sides[0] is sides[1] else np.asarray(sides[1].seqstart_py, np.int32)]
    return SeqInfo(offsets[0], offsets[1], sides[0].max_seqlen, sides[1].max_seqlen)
