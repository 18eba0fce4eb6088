"""Tables whose values their sizes decide: the rows of a dense cache, and offsets of sequences of one length."""

from __future__ import annotations

from functools import lru_cache

import torch

from torch_frontend.dispatch import tensor_kinds

Tensor = torch.Tensor


def rows_as_table(batch: int, device: torch.device) -> Tensor:
    """Returns the block table of a dense cache: sequence i has page i. int32 ``[batch, 1]``. Do not write."""
    return _multiples(batch, 1, device, True)


def equal_offsets(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Returns the offsets of so many sequences of ``tokens`` each. int32 ``[batch + 1]``. Do not write."""
    return _multiples(batch + 1, tokens, device)


def places(tokens: int, device: torch.device) -> Tensor:
    """Returns the numbers from 0 to ``tokens - 1``. int32. Do not write."""
    return _multiples(tokens, 1, device)


def _multiples(count: int, step: int, device: torch.device, column: bool = False) -> Tensor:
    """Returns ``0, step, 2 * step, ...``, the same tensor for equal arguments and torch's current stream.

    A kernel on another stream could read the tensor before it is written, or after its memory is free. A CUDA graph
    reads its tensors for as long as it lives, so a new one from the graph's memory is returned while one is captured.
    Modes and compilers get a new one, too, because they take tensors for their own purposes.

    Args:
        column: whether the shape is ``[count, 1]``.
    """
    if torch.compiler.is_compiling() or tensor_kinds.are_modes_active():
        return _new(count, step, device, column)
    if device.type == "cpu":
        return _on_stream(count, step, device, column, 0)
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return _new(count, step, device, column)
    index = torch.cuda.current_device() if device.index is None else device.index
    return _on_stream(count, step, device, column, torch._C._cuda_getCurrentRawStream(index))


def _new(count: int, step: int, device: torch.device, column: bool) -> Tensor:
    numbers = torch.arange(0, count * step, step, dtype=torch.int32, device=device)
    return numbers[:, None] if column else numbers


@lru_cache(maxsize=256)
def _on_stream(count: int, step: int, device: torch.device, column: bool, stream: int) -> Tensor:
    with torch.inference_mode(False):  # a call outside of inference mode reads it, too
        return _new(count, step, device, column)
