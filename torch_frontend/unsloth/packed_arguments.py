"""Checks the arguments of Unsloth's functions for packed rows."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.call.kinds import MOST, check_size
from attn_core.call.options import check_flag
from attn_core.call.seq_info import is_host_int
from attn_core.errors import DTypeError, SpecError, shown
from torch_frontend.dispatch.plan import check_tensor

Tensor = torch.Tensor
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


def check_triple(seq_info: Any) -> Packed:
    """Returns the triple. Raises SpecError for anything else."""
    if not isinstance(seq_info, tuple) or len(seq_info) != 3:
        raise SpecError(f"seq_info: expected the triple (lengths, cu_seqlens, longest), got {type(seq_info).__name__}")
    check_tensor("seq_info", seq_info[1])
    return seq_info


def device_of(device: Any) -> torch.device:
    """Returns a device. Raises SpecError for a value that names none."""
    if not isinstance(device, torch.device | str | int):
        raise SpecError(f"device={shown(device)}: expected a torch.device or its name")
    try:
        return torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SpecError(f"device={shown(device)}: expected a torch.device or its name; {error}") from None


def check_ignore_index(name: str, labels: Tensor, ignore_index: Any) -> None:
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
