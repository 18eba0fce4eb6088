"""The steps of a call on a cache that both of its paths take: checks of values, positions, the append."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.dropins.flash_attn.cache import Cached, append_arguments, check_values
from torch_frontend.paged import constant_tables
from torch_frontend.paged.attention import append_kv

Tensor = torch.Tensor


def check_host_values(call: Cached, seqlens: Tensor | None, capacity: int, new: int) -> None:
    """Checks the values of tables on the CPU; seqlens: cache_seqlens as a tensor."""
    check_values(call, to_numpy(seqlens, call.cache_batch_idx, call.cache_leftpad), capacity, new)


def to_numpy(*tables: Tensor | None) -> tuple[Any, ...]:
    """Returns tables on the CPU as numpy arrays."""
    return tuple([None if each is None else each.numpy() for each in tables])


def positions_of(before: Tensor, tokens: int, banded: bool) -> Tensor:
    """Returns the rotary position of each query, int32 ``[batch, tokens]``."""
    first = before.unsqueeze(1)
    if tokens == 1:
        return first
    return first + constant_tables.places(tokens, before.device) if banded else first.expand(-1, tokens)


def append(call: Cached, pages: Tensor, seq_lens: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Appends the new tokens, and returns both caches; seq_lens count the tokens."""
    batch, new = call.k.shape[:2]
    offsets = None if new == 1 else constant_tables.equal_offsets(batch, new, pages.device)
    tensors, tables = append_arguments(call, pages, seq_lens, interleaved, offsets)
    append_kv(*tensors, **tables)
    return call.k_cache, call.v_cache
