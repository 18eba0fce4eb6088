"""Functions for packed rows under Unsloth's names (``unsloth/utils/packing.py``), written from their behaviour.

``seq_info`` is the host's triple ``(lengths int32 [documents], cu_seqlens int32 [documents + 1], longest document)``.
``run_attention`` and ``attention`` accept it unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from attn_core.call.kinds import MOST, check_kind, check_size, is_host_int
from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from torch_frontend.dispatch.plan import check_tensor, device_of
from torch_frontend.dispatch.tensor_kinds import check_data

__all__ = [
    "build_sdpa_packed_attention_mask",
    "build_xformers_block_causal_mask",
    "cover_padded_cu_seqlens",
    "get_packed_info_from_kwargs",
    "mask_packed_boundary_labels",
    "mask_packed_sequence_boundaries",
    "move_xformers_attention_bias",
]

Tensor = torch.Tensor


def get_packed_info_from_kwargs(
    kwargs: Mapping[str, Any], device: torch.device | str | int, position_ids: Tensor | None = None
) -> Packed | None:
    """Returns the ``seq_info`` of ``kwargs["packed_seq_lengths"]``, else that of ``position_ids``, else None.

    The longest length must be on the host, so this reads a tensor on a GPU once.

    Args:
        position_ids: ``[1, tokens]``, 0 at the first token of each document. Other shapes, and rows with one document,
            give None. The positions of a padded row would be misread, so pass them only for rows without padding.
    """
    check_kind("kwargs", kwargs, Mapping, "a dict of keywords")
    check_kind("position_ids", position_ids, (Tensor, type(None)), "a tensor, or None")
    place = device_of(device)
    values = kwargs.get("packed_seq_lengths")
    if values is None and position_ids is not None:
        values = lengths_of_positions(position_ids)
    if values is None:
        return None
    lengths = lengths_of("packed_seq_lengths", values)
    host = lengths.cpu()
    if (host < 0).any():
        raise SpecError(f"packed_seq_lengths: expected lengths of 0 or more, got {int(host.min())}")
    info = SeqInfo.from_lengths(host.tolist(), array=torch.from_numpy)
    return host.to(place, torch.int32), info.cu_seqlens_q.to(place), info.max_len_q


def cover_padded_cu_seqlens(seq_info: Packed, total_tokens: int) -> tuple[Tensor, int]:
    """Returns the offsets of the documents and the longest length; padding behind them is one more document.

    It is for code that calls a varlen kernel itself: some leave rows behind the last offset unwritten.
    ``run_attention`` gives padding the output 0. Reads the offsets' last value on the host.
    """
    _, cu_seqlens, longest = check_triple(seq_info)
    check_size("total_tokens", total_tokens, 0)
    padding = total_tokens - int(cu_seqlens[-1])
    if padding <= 0:
        return cu_seqlens, longest
    return torch.cat((cu_seqlens, cu_seqlens.new_full((1,), total_tokens))), max(longest, padding)


def build_sdpa_packed_attention_mask(
    seq_info: Packed,
    *,
    dtype: torch.dtype,
    device: torch.device | str | int,
    sliding_window: int | None = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Builds an additive mask of all documents, ``[1, 1, tokens, tokens]``: 0 is visible, -inf is hidden.

    It has tokens² elements and is for code that calls SDPA itself; ``run_attention`` and ``attention`` need only
    ``seq_info``.

    Args:
        sliding_window: the number of keys that a query sees, itself included; None, 0 or less: all keys before it.
        total_tokens: the length of the row. Padding behind the documents becomes one more document, because SDPA gives
            NaN for rows that see no key.
        is_causal: False shows the whole document to each query.

    Raises:
        SpecError: for a window without causal.
    """
    keys = window_keys(sliding_window, is_causal)
    check_kind("dtype", dtype, torch.dtype, "a torch.dtype")
    if not dtype.is_floating_point:
        raise DTypeError(f"dtype: expected a float dtype, which has -inf, got {dtype}")
    device = device_of(device)
    if device.type == "meta":
        raise SpecError("device='meta': expected a device with memory, because the mask depends on the lengths' values")
    lengths = lengths_with_padding(seq_info, total_tokens).to(device)
    tokens = int(lengths.sum())
    document = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)  # [tokens]
    visible = document[:, None] == document
    if is_causal:
        distance = torch.arange(tokens, device=device)
        distance = distance[:, None] - distance  # [queries, keys]: query position minus key position
        visible &= (distance >= 0) & (distance < (keys or tokens))
    mask = torch.zeros((tokens, tokens), dtype=dtype, device=device).masked_fill_(~visible, -torch.inf)
    return mask[None, None]


def build_xformers_block_causal_mask(
    seq_info: Packed | None,
    *,
    sliding_window: int | None = None,
    base_mask: Any = None,
    total_tokens: int | None = None,
    is_causal: bool = True,
) -> Any:
    """Builds xformers' bias of the same mask, for code that calls xformers itself; None if xformers is not installed.

    Its offsets are on the device of the lengths. Without ``seq_info`` it returns ``base_mask`` with the window added; a
    tensor or None stays unchanged, because a tensor already is a complete mask.

    Args:
        total_tokens, is_causal: as in ``build_sdpa_packed_attention_mask``.

    Raises:
        SpecError: for a window without causal, or with a ``base_mask`` that cannot apply it.
    """
    keys = window_keys(sliding_window, is_causal)
    if total_tokens is not None:
        check_size("total_tokens", total_tokens, 0)
    if seq_info is None:
        return _add_window(base_mask, keys) if keys else base_mask
    try:
        from xformers.ops.fmha import attn_bias  # type: ignore[import-not-found]
    except ImportError:
        return None
    lengths = lengths_with_padding(seq_info, total_tokens)
    kind = attn_bias.BlockDiagonalCausalMask if is_causal else attn_bias.BlockDiagonalMask
    mask = kind.from_seqlens([length for length in lengths.tolist() if length])
    return move_xformers_attention_bias(_add_window(mask, keys) if keys else mask, lengths.device)


def _add_window(mask: Any, sliding_window: int) -> Any:
    """Returns an xformers bias with a window added; None and tensors unchanged."""
    if mask is None or isinstance(mask, Tensor):
        return mask
    if not hasattr(mask, "make_local_attention"):
        raise SpecError(
            f"sliding_window={sliding_window}: expected a base_mask that has make_local_attention, "
            f"got {type(mask).__name__}"
        )
    return mask.make_local_attention(window_size=sliding_window)


def move_xformers_attention_bias(attn_bias: Any, device: torch.device | str | int) -> Any:
    """Returns an xformers bias with its tensors on a device; None stays None. The given bias does not change.

    Some versions of the block-diagonal biases have no ``to`` of their own, so their offsets are moved one by one.
    """
    if attn_bias is None:
        return None
    device_of(device)
    if not hasattr(attn_bias, "q_seqinfo"):
        if isinstance(attn_bias, Tensor):
            check_tensor("attn_bias", attn_bias)
            if attn_bias.is_meta:
                raise SpecError("attn_bias: expected a tensor with data, got one on the device meta")
        return attn_bias.to(device) if hasattr(attn_bias, "to") else attn_bias
    sides = {}
    for side in ("q_seqinfo", "k_seqinfo"):
        info = getattr(attn_bias, side)
        values = {each.name: getattr(info, each.name) for each in fields(info)}
        tensors = {name: value.to(device) for name, value in values.items() if hasattr(value, "to")}
        sides[side] = replace(info, **tensors)
    return replace(attn_bias, **sides)


def mask_packed_sequence_boundaries(
    shift_labels: Tensor, seq_lengths: Tensor | Sequence[int] | None, *, ignore_index: int = -100
) -> bool:
    """Sets the label of each document's last token to ``ignore_index`` in place: its next token is another document's.

    Labels may have any memory layout. Documents of length 0 have no last token. The last document may end one token
    behind the labels, as it does with shifted labels. Does not synchronise with the device.

    Returns:
        Whether there were lengths.

    Raises:
        ShapeError: for documents that exceed the labels by more than that one token (checked on the CPU only, because
            reading lengths on a GPU would wait for it).
    """
    if seq_lengths is None:
        return False
    check_tensor("shift_labels", shift_labels)
    total = shift_labels.numel()
    lengths, ends = lengths_within("shift_labels", shift_labels, seq_lengths, ignore_index, total + 1)
    if not len(lengths):
        return False
    last = torch.where(lengths > 0, ends - 1, total).clamp(max=total)  # index `total` is a spare element, dropped below
    is_last = torch.zeros(total + 1, dtype=torch.bool, device=ends.device).index_fill_(0, last, True)
    shift_labels.masked_fill_(is_last[:total].view(shift_labels.shape), ignore_index)
    return True


def mask_packed_boundary_labels(
    labels: Any, seq_lengths: Tensor | Sequence[int] | None, *, ignore_index: int = -100
) -> Any:
    """Returns a copy of labels with ``ignore_index`` at the first token of every document, for a loss that shifts them.

    The document before would otherwise have to predict that token. If the documents end with the labels, the very
    first label, which nothing predicts, is set as well. Without lengths, or for labels that are not a tensor, returns
    the labels themselves. Does not synchronise with the device.

    Raises:
        ShapeError: for documents that exceed the labels (checked on the CPU only, because reading lengths on a GPU
            would wait for it).
    """
    if not isinstance(labels, Tensor) or seq_lengths is None:
        return labels
    check_tensor("labels", labels)
    if not labels.numel():
        return labels
    total = labels.numel()
    _, ends = lengths_within("labels", labels, seq_lengths, ignore_index, total)
    if not len(ends):
        return labels
    # An end at `total` wraps to index 0, the very first label. Dropping it instead would wait for the device.
    first = torch.zeros(total, dtype=torch.bool, device=ends.device).index_fill_(0, ends.clamp(max=total) % total, True)
    return labels.masked_fill(first.view(labels.shape), ignore_index)


Packed = tuple[Tensor, Tensor, int]


def window_keys(sliding_window: int | None, is_causal: bool) -> int | None:
    """Returns the number of keys in the window, or None. Raises SpecError for a window without causal."""
    check_flag("is_causal", is_causal)
    if sliding_window is not None and not is_host_int(sliding_window):
        raise SpecError(f"sliding_window={shown(sliding_window)}: expected a number of keys, or None")
    if sliding_window is None or sliding_window <= 0:
        return None
    if sliding_window > MOST:
        raise SpecError(f"sliding_window={shown(sliding_window)}: expected at most {MOST} keys")
    if not is_causal:
        raise SpecError(
            f"sliding_window={sliding_window}: expected None with is_causal=False, because the window ends at the query"
        )
    return sliding_window


def check_triple(seq_info: object) -> Packed:
    """Returns the triple. Raises SpecError for anything else."""
    if not isinstance(seq_info, tuple) or len(seq_info) != 3:
        raise SpecError(f"seq_info: expected the triple (lengths, cu_seqlens, longest), got {type(seq_info).__name__}")
    check_tensor("seq_info", seq_info[1])
    return seq_info


def lengths_within(
    name: str, labels: Tensor, seq_lengths: Tensor | Sequence[int], ignore_index: int, most: int
) -> tuple[Tensor, Tensor]:
    """Returns the lengths and the ends of the documents of labels, on their device. Raises ShapeError beyond most."""
    check_ignore_index(name, labels, ignore_index)
    lengths = lengths_of("seq_lengths", seq_lengths)
    check_data(lengths, **{name: labels})
    lengths = lengths.to(labels.device)
    ends = lengths.cumsum(0)
    if len(ends) and ends.device.type == "cpu" and int(ends[-1]) > most:
        raise ShapeError(f"seq_lengths: expected no more than {most} tokens in all, got {int(ends[-1])}")
    return lengths, ends


def check_ignore_index(name: str, labels: Tensor, ignore_index: int) -> None:
    if not is_host_int(ignore_index):
        raise SpecError(f"ignore_index={shown(ignore_index)}: expected an int")
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise DTypeError(f"{name}: expected integers, got {labels.dtype}")
    limits = torch.iinfo(labels.dtype)
    if not limits.min <= ignore_index <= limits.max:
        raise SpecError(f"ignore_index={ignore_index}: expected a value of {labels.dtype}, the dtype of {name}")


def lengths_of(name: str, values: Any) -> Tensor:
    """Returns lengths as int64 ``[documents]`` on their device; flattens nested lists and tensors."""
    try:
        lengths = values if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise SpecError(f"{name}: expected lengths as integers, got {type(values).__name__}") from None
    check_tensor(name, lengths)
    if lengths.numel() and (lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool):
        raise SpecError(f"{name}: expected lengths as integers, got {lengths.dtype}")
    return lengths.reshape(-1).to(torch.int64)


def lengths_with_padding(seq_info: Packed, total_tokens: int | None) -> Tensor:
    """Returns the lengths of the documents, and of the padding behind them if the row is longer."""
    lengths = lengths_of("seq_info", check_triple(seq_info)[0])
    if total_tokens is not None:
        check_size("total_tokens", total_tokens, 0)
    padding = 0 if total_tokens is None else total_tokens - int(lengths.sum())
    return lengths if padding <= 0 else torch.cat((lengths, lengths.new_tensor([padding])))


def lengths_of_positions(position_ids: Tensor) -> Tensor | None:
    """Returns the lengths of the documents that start at position 0 in ``[1, tokens]``; None for fewer than two."""
    if position_ids.ndim != 2 or len(position_ids) != 1:
        return None
    row = position_ids[0].cpu()
    starts = (row == 0).nonzero().flatten()
    if len(starts) < 2 or int(starts[0]):
        return None
    return torch.cat((starts, starts.new_tensor([len(row)]))).diff()
