"""Whether all ranks of a group make the same call: asked the first time that a rank makes a call of its kind."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from attn_core.errors import SpecError
from torch_frontend.context_parallel.exchange import Axis


def agree(asked: Any, outcome: str, *axes: Axis) -> None:
    """Compares a call of a new kind over all axes of ranks; a call that was compared costs nothing.

    Args:
        asked: the question; outcome: what this rank makes of it.

    Raises:
        SpecError: on every rank, where they differ; it tells what each of them calls.
    """
    shared = tuple(axis for axis in axes if axis.size > 1)
    _compared(f"{_told(asked)}: {outcome}", str(asked.device), shared)
    if asked.documents is None:
        if len(_SEEN) > 4096:
            _SEEN.clear()
        _SEEN.add((asked.shapes, asked.dtype, shared))


_SEEN: set[Any] = set()
"""Shapes, dtype and axes of the calls that were compared. Packed calls are left out, because their offsets change."""


def tell_refusal(error: Exception, tensors: tuple[Any, ...], packed: bool, device: str, *axes: Axis) -> None:
    """Tells the other ranks that this rank refuses a call, if they compare it now and would wait for this rank.

    This rank cannot know whether they do. It assumes so if the call is packed, or its shapes are new to this rank.
    Otherwise it tells nothing: the other ranks exchange keys already, and compare nothing.

    Raises:
        SpecError: on every rank, unless all refuse alike; it tells what each of them calls.
    """
    shared = tuple(axis for axis in axes if axis.size > 1)
    shapes = tuple(getattr(tensor, "shape", None) for tensor in tensors)
    if packed or (shapes, getattr(tensors[0], "dtype", None), shared) not in _SEEN:
        _compared(f"{type(error).__name__}: {str(error).splitlines()[0]}", device, shared)


def _told(asked: Any) -> str:
    """What has to be the same everywhere, in words; process groups have names of their own on every rank."""
    shapes = " ".join(f"{name} {list(shape)}" for name, shape in zip("qkv", asked.shapes, strict=True))
    ranks, options = asked.ranks, asked.options
    documents = "" if asked.documents is None else f" documents {asked.documents}"
    sinks = "" if asked.sinks is None else " sinks"
    return (
        f"{shapes}{sinks} {asked.dtype}, length {ranks.q_len}/{ranks.kv_len}, strategy {ranks.strategy}, layout "
        f"{ranks.layout}, head_groups {ranks.head_groups}, {options}{documents}, gradients {asked.needs_backward}, "
        f"backend {asked.requested}"
    )


@lru_cache(maxsize=4096)
def _compared(told: str, device: str, axes: tuple[Axis, ...]) -> None:
    """Over one axis after the other, and nobody leaves before all are done: who differs from ranks along one axis only
    is seen by all along the other."""
    digest = torch.frombuffer(bytearray(hashlib.sha256(told.encode()).digest()), dtype=torch.int64).to(device)
    differ = digest.new_zeros(1, dtype=torch.bool)
    for axis in axes:
        mine = torch.cat([digest, differ.to(digest.dtype)])
        found = torch.ops._c10d_functional.all_gather_into_tensor(mine, axis.size, axis.name)
        everyone = torch.ops._c10d_functional.wait_tensor(found).view(axis.size, -1)
        differ = (everyone != everyone[0]).any() | (everyone[:1, -1] > 0)
    if not bool(differ):
        return
    texts = [told]
    for axis in axes:
        group = dist.distributed_c10d._resolve_process_group(axis.name)  # type: ignore[arg-type, unused-ignore]
        gathered: list[Any] = [None] * axis.size
        dist.all_gather_object(gathered, texts, group=group)
        texts = [text for neighbours in zip(*gathered, strict=True) for text in neighbours]  # along the inner axis
    lines = "\n".join(f"  rank {rank}: {text}" for rank, text in enumerate(texts))
    raise SpecError(f"context_parallel_attention: expected the same call on every rank, got\n{lines}")
