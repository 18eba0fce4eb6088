"""Calls torch's functional collectives below autograd. Apart from the exchanges, so that tests can make one fail.

torch registers their derivatives in Python, which costs time without a gradient, too: on one CPU core, about 25 of the
60 microseconds of a collective. Context parallelism has a derivative of its own and needs no other.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
_ops = torch.ops._c10d_functional


def all_to_all_single(sent: Tensor, received_sizes: list[int], sent_sizes: list[int], group: str) -> Tensor:
    """Starts to send ``sent_sizes[r]`` numbers of a flat tensor to rank r; returns what will arrive, flat."""
    return _below_autograd(_ops.all_to_all_single.default, sent, received_sizes, sent_sizes, group)  # type: ignore[no-any-return]


def all_gather_into_tensor_coalesced(tensors: list[Tensor], size: int, group: str) -> list[Tensor]:
    """Starts to gather tensors of ``size`` ranks in one message; returns what will arrive, rank by rank."""
    return _below_autograd(_ops.all_gather_into_tensor_coalesced.default, tensors, size, group)  # type: ignore[no-any-return]


def wait_tensor(tensor: Tensor) -> Tensor:
    """Waits for the result of a collective, on a GPU on the current stream, and returns it."""
    return _below_autograd(_ops.wait_tensor.default, tensor)  # type: ignore[no-any-return]


def _below_autograd(operator: Any, *arguments: Any) -> Any:
    if torch.compiler.is_compiling():  # a trace keeps the operators themselves
        return operator(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)
