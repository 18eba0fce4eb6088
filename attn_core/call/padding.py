"""A padded batch as packed documents: which of its tokens stay, and where they were."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from attn_core.call.kinds import check_kind, check_size
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import DTypeError, ShapeError, SpecError


class Padding(NamedTuple):
    """What ``unpad`` took out of a batch, for ``attention(seq_info=)`` and for ``repad``.

    Attributes:
        seq_info: each row's tokens as a document; a row without tokens is an empty one.
        indices: ``[tokens]``, on the device of the tensors: where each packed token was in the batch, as one row of
            ``batch * length`` places. That number itself stands for no place.
        attention_mask: the mask as ``unpad`` got it.
    """

    seq_info: SeqInfo
    indices: Any
    attention_mask: Any


def check_packed(packed: Any, padding: Padding) -> None:
    """Raises SpecError unless ``padding`` is one, ShapeError unless an array has its tokens, ``[1, tokens, ...]``."""
    check_kind("padding", padding, Padding, "what unpad returned last")
    expected = (1, *padding.indices.shape)
    if tuple(packed.shape[:2]) != expected:
        hint = "; pass packed[None]" if tuple(packed.shape[:1]) == expected[1:] else ""
        raise ShapeError(
            f"packed: expected [1, tokens, ...] as from unpad, {list(expected)} and any further axes, got "
            f"{list(packed.shape)}{hint}"
        )


def check_batch(attention_mask: Any, arrays: tuple[Any, ...], total: object) -> None:
    """Checks a padded batch by its metadata.

    Raises:
        ShapeError, DTypeError, SpecError: naming the argument.
    """
    if isinstance(attention_mask, np.ma.MaskedArray):
        raise SpecError("attention_mask: expected an array without a mask, got a numpy.ma.MaskedArray")
    shape, dtype = tuple(attention_mask.shape), str(attention_mask.dtype).removeprefix("torch.")
    if len(shape) != 2 or not shape[0]:
        raise ShapeError(f"attention_mask: expected [batch, length] with one row or more, got {list(shape)}")
    check_size("attention_mask: batch * length", shape[0] * shape[1], 0)
    if not dtype.startswith(("bool", "int", "uint")):
        raise DTypeError(
            f"attention_mask: expected bool or int, True or 1 = a token, got {dtype}; write attention_mask == 1 if "
            "that is what its numbers mean"
        )
    for number, array in enumerate(arrays):
        if tuple(array.shape[:2]) != shape:
            heads_first = (*array.shape[:1], *array.shape[2:3]) == shape
            raise ShapeError(
                f"tensors[{number}]: expected [batch, length, ...] as in attention_mask, {list(shape)} and any further "
                f"axes, got {list(array.shape)}{'; pass it with swapaxes(1, 2)' if heads_first else ''}"
            )
    if total is not None:
        check_size("total", total, 0)


def kept(attention_mask: np.ndarray, total: int | None) -> tuple[SeqInfo, np.ndarray]:
    """Returns the documents and the indices of ``Padding``, of a mask on the host.

    Raises:
        SpecError: for a number beside 0 and 1, or more tokens than ``total``.
    """
    if attention_mask.dtype != bool and (wrong := (attention_mask != 0) & (attention_mask != 1)).any():
        row, token = np.argwhere(wrong)[0].tolist()
        raise SpecError(
            f"attention_mask[{row}, {token}]={attention_mask[row, token]}: expected 1 for a token, 0 for padding; "
            "numbers of documents are q_segment_ids= of attention"
        )
    keep = attention_mask != 0
    lengths = keep.sum(1)
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    indices = np.flatnonzero(keep)
    if total is None:
        return SeqInfo(offsets, offsets, int(lengths.max()), int(lengths.max())), indices
    if total < len(indices):
        raise SpecError(f"total={total}: expected at least the {len(indices)} tokens of attention_mask")
    indices = np.pad(indices, (0, total - len(indices)), constant_values=keep.size)
    return SeqInfo(offsets, offsets, keep.shape[1], keep.shape[1]), indices
