"""Helpers around packed rows under Unsloth's names (``unsloth/utils/packing.py``), written from what they do.

``seq_info`` is the host's triple ``(lengths int32 [documents], cu_seqlens int32 [documents + 1], longest document)``,
which ``run_attention`` and ``attention`` take as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from attn_core.call.seq_info import SeqInfo
from attn_core.errors import ShapeError, SpecError

__all__ = [
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "get_packed_info_from_kwargs",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
]

Tensor = torch.Tensor
Packed = tuple[Tensor, Tensor, int]


def get_packed_info_from_kwargs(kwargs: Mapping[str, Any], device: Any) -> Packed | None:
    """``seq_info`` of ``kwargs["packed_seq_lengths"]``; None where there is none.

    The longest length must be on the host: a tensor on a GPU is read once, here.
    """
    given = kwargs.get("packed_seq_lengths")
    if given is None:
        return None
    lengths = _lengths("packed_seq_lengths", given)
    host = lengths.cpu()
    if (host < 0).any():
        raise SpecError(f"packed_seq_lengths: expected lengths of 0 or more, got {int(host.min())}")
    info = SeqInfo.from_lengths(host.tolist(), array=torch.from_numpy)
    return host.to(device, torch.int32), info.cu_seqlens_q.to(device), info.max_len_q


def build_sdpa_packed_attention_mask(
    seq_info: Packed, *, dtype: torch.dtype, device: Any, sliding_window: int | None = None
) -> Tensor:
    """An additive causal mask of all documents, ``[1, 1, tokens, tokens]``: 0 where visible, -inf where not.

    tokens² elements, for code that calls SDPA itself; ``run_attention`` and ``attention`` take ``seq_info`` without it.

    Args:
        sliding_window: how many keys a query sees, itself included; None, 0 or less for all before it.
    """
    lengths = _lengths("seq_info", seq_info[0]).to(device, torch.int64)
    tokens = int(lengths.sum())
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)  # [tokens]
    distance = torch.arange(tokens, device=device)
    distance = distance[:, None] - distance  # [queries, keys]: how far before the query a key is
    visible = (document[:, None] == document) & (distance >= 0)
    if sliding_window is not None and sliding_window > 0:
        visible &= distance < sliding_window
    mask = torch.zeros((tokens, tokens), dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    return mask[None, None]


def build_xformers_block_causal_mask(
    seq_info: Packed | None, *, sliding_window: int | None = None, base_mask: Any = None
) -> Any:
    """xformers' bias of the same, for code that calls xformers itself; None where xformers is not installed.

    Its offsets are where the lengths are. Where ``seq_info`` is None it is ``base_mask``, with the window: a tensor or
    None is returned as it is, for a tensor is complete by itself.

    Raises:
        SpecError: for a window beside a ``base_mask`` that cannot take it.
    """
    local = sliding_window is not None and sliding_window > 0
    if seq_info is None:
        return _windowed(base_mask, sliding_window) if local else base_mask
    try:
        from xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask  # type: ignore[import-not-found]
    except ImportError:
        return None
    lengths = _lengths("seq_info", seq_info[0])
    mask = BlockDiagonalCausalMask.from_seqlens([length for length in lengths.tolist() if length])
    return _moved(_windowed(mask, sliding_window) if local else mask, lengths.device)


def _windowed(mask: Any, sliding_window: int | None) -> Any:
    if mask is None or isinstance(mask, Tensor):
        return mask
    if not hasattr(mask, "make_local_attention"):
        raise SpecError(
            f"sliding_window={sliding_window}: expected a base_mask that has make_local_attention, "
            f"got {type(mask).__name__}"
        )
    return mask.make_local_attention(window_size=sliding_window)


def _moved(mask: Any, device: torch.device) -> Any:
    """The block-diagonal bias with its offsets on a device; not by its own ``to``, which some versions lack."""
    sides = {}
    for side in ("q_seqinfo", "k_seqinfo"):
        info = getattr(mask, side)
        values = {each.name: getattr(info, each.name) for each in fields(info)}
        tensors = {name: value.to(device) for name, value in values.items() if hasattr(value, "to")}
        sides[side] = replace(info, **tensors)
    return replace(mask, **sides)


def mask_packed_sequence_boundaries(shift_labels: Tensor, seq_lengths: Any, *, ignore_index: int = -100) -> bool:
    """Sets, in place, the label of each document's last token to ``ignore_index``: what follows is another document.

    Labels of any layout are changed; documents of length 0 have no last token; the last document may end one token
    behind the labels, as shifted labels do. Without a device synchronisation.

    Returns:
        Whether there were lengths.

    Raises:
        ShapeError: for documents that are longer than the labels by more than that one token (on the CPU, where the
            lengths can be looked at).
    """
    if seq_lengths is None:
        return False
    lengths = _lengths("seq_lengths", seq_lengths).to(shift_labels.device, torch.int64)
    if not len(lengths):
        return False
    total = shift_labels.numel()
    ends = lengths.cumsum(0)
    if ends.device.type == "cpu" and int(ends[-1]) > total + 1:
        raise ShapeError(f"seq_lengths: expected no more than {total + 1} tokens in all, got {int(ends[-1])}")
    last = torch.where(lengths > 0, ends - 1, total).clamp(max=total)  # what is not there goes behind the end
    found = torch.zeros(total + 1, dtype=torch.bool, device=ends.device).index_fill_(0, last, True)
    shift_labels.masked_fill_(found[:total].view(shift_labels.shape), ignore_index)
    return True


def mask_packed_boundary_labels(labels: Any, seq_lengths: Any, *, ignore_index: int = -100) -> Any:
    """A copy of labels that a loss will shift itself, with ``ignore_index`` where another document begins.

    That label is what the document before it would have to predict. The first label, which nothing predicts, goes where
    the documents end with the labels. Labels that are no tensor, or that have no lengths, are returned as they are.
    Without a device synchronisation.

    Raises:
        ShapeError: for documents that are longer than the labels (on the CPU, where the lengths can be looked at).
    """
    if not isinstance(labels, Tensor) or seq_lengths is None or not labels.numel():
        return labels
    total = labels.numel()
    ends = _lengths("seq_lengths", seq_lengths).to(labels.device).cumsum(0)
    if not len(ends):
        return labels
    if ends.device.type == "cpu" and int(ends[-1]) > total:
        raise ShapeError(f"seq_lengths: expected no more than {total} tokens in all, got {int(ends[-1])}")
    first = torch.zeros(total, dtype=torch.bool, device=ends.device).index_fill_(0, ends.clamp(max=total) % total, True)
    return labels.masked_fill(first.view(labels.shape), ignore_index)


def _lengths(name: str, given: Any) -> Tensor:
    """int64 ``[documents]``, where they are; of nested lists and tensors the elements in order."""
    lengths = given if isinstance(given, Tensor) else torch.tensor(given, device="cpu")
    if lengths.numel() and (lengths.is_floating_point() or lengths.dtype == torch.bool):
        raise SpecError(f"{name}: expected lengths as integers, got {lengths.dtype}")
    return lengths.reshape(-1).to(torch.int64)
