"""Checks that all ranks make the same call, the first time that a rank makes a call of its kind."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from attn_core.context_parallel.request import Request
from attn_core.errors import SpecError
from torch_frontend.context_parallel.mesh import RankAxis


def check_agreement(request: Request, outcome: str, *axes: RankAxis) -> None:
    """Compares a request and its outcome between all ranks, unless they were compared before.

    Args:
        outcome: the strategy and the kernels that this rank planned, or its error.

    Raises:
        SpecError: on every rank, if the requests or outcomes differ; the message lists each rank's.
    """
    shared = tuple(axis for axis in axes if axis.size > 1)
    _compare(f"{_describe(request)}: {outcome}", str(request.device), shared)
    if request.documents is None and request.bands is None:
        # Bounded, because a process with ever new shapes would fill the set.
        if len(_COMPARED) > 4096:
            _COMPARED.clear()
        _COMPARED.add((request.shards[:3], shared))


_COMPARED: set[Any] = set()
"""Shapes, dtypes and axes of calls that were compared. Packed calls and key ranges are left out."""


def announce_refusal(error: Exception, tensors: tuple[Any, ...], packed: bool, device: str, *axes: RankAxis) -> None:
    """Tells the other ranks that this rank refuses a call, if they compare the call and would wait for this rank.

    This rank cannot know whether the others compare. It assumes so if the call is packed, or if its shapes are new to
    this rank. Otherwise it sends nothing, because the other ranks exchange keys already.

    Raises:
        SpecError: on every rank, unless all ranks refuse with one error; the message lists each rank's call.
    """
    shared = tuple(axis for axis in axes if axis.size > 1)
    shards = tuple(map(_metadata, tensors))
    if packed or (shards, shared) not in _COMPARED:
        _compare(f"{type(error).__name__}: {str(error).splitlines()[0]}", device, shared)


def _metadata(tensor: Any) -> tuple[Any, Any]:
    """Returns the shape and dtype of what the caller passed as a tensor. Never raises, because other ranks wait."""
    try:
        return getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    except RuntimeError:  # a nested tensor, or a parameter that is not initialised, has no shape
        return None, None


def _describe(request: Request) -> str:
    """Returns the properties of a request that all ranks must share. Names of process groups differ between ranks."""
    arrays = [array for array in request.shards[:3] if array is not None]
    shapes = " ".join(f"{name} {list(shape)}" for name, (shape, _) in zip("qkv", arrays, strict=True))
    documents = "" if request.documents is None else f" documents {request.documents}"
    sinks = "" if request.shards[3] is None else " sinks"
    bands = "" if request.bands is None else f" key_ranges {[tuple(each) for each in request.bands]}"
    return (
        f"{shapes}{sinks} {arrays[0][1]}, length {request.lengths[0]}/{request.lengths[1]}, strategy "
        f"{request.strategy}, layout {request.layout}, head_groups {request.head_groups}, {request.options}"
        f"{documents}{bands}, gradients {request.needs_backward}, backend {request.requested}"
    )


@lru_cache(maxsize=4096)
def _compare(text: str, device: str, axes: tuple[RankAxis, ...]) -> None:
    """Raises SpecError unless all ranks have the same text. Cached, so that each text is compared once.

    Compares hashes along each axis in turn. Every rank takes part in every axis, so that a difference along one axis
    reaches all ranks. Only if there is a difference, the texts themselves are exchanged for the message.
    """
    # sha256, because Python's hash of a string differs between processes. Its 32 bytes travel as four int64.
    digest_bytes = hashlib.sha256(text.encode(errors="backslashreplace")).digest()
    digest = torch.frombuffer(bytearray(digest_bytes), dtype=torch.int64).to(device)
    differ = digest.new_zeros(1, dtype=torch.bool)
    for axis in axes:
        # The flag carries a difference along an earlier axis to the ranks of the next one.
        digest_and_flag = torch.cat([digest, differ.to(digest.dtype)])
        gathering = torch.ops._c10d_functional.all_gather_into_tensor(digest_and_flag, axis.size, axis.name)
        everyone = torch.ops._c10d_functional.wait_tensor(gathering).view(axis.size, -1)
        differ = (everyone != everyone[0]).any() | (everyone[:1, -1] > 0)
    # Waits for the device, but once per text: the cache keeps the answer. It keeps no errors, so ranks that differ
    # compare again.
    if not bool(differ):
        return
    texts = [text]
    for axis in axes:
        group = dist.distributed_c10d._resolve_process_group(axis.name)  # type: ignore[arg-type, unused-ignore]
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, texts, group=group)
        texts = [text for column in zip(*gathered, strict=True) for text in column]  # in the order of ranks
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise SpecError(f"context_parallel_attention: expected the same call on every rank, got\n{lines}")
