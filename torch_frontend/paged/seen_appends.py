"""Eager appends on a GPU by offsets or by slots: one lookup by metadata instead of many checks.

The checks that depend on metadata alone run once. Types and ``requires_grad`` are checked on every call. Whatever this
path does not know, it leaves to the general one, which accepts it or names it in an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import forward_ad

from attn_core.paged import arguments
from attn_core.paged.rotary import COS, SIN
from torch_frontend.dispatch import offsets, plan
from torch_frontend.dispatch.wrappers import on_device
from torch_frontend.paged.append_launch import repeated_on_gpu
from torch_frontend.paged.places import Places

Tensor = torch.Tensor
_FIELDS = Places._fields[:7]
_POOLS = ("k_pages", "v_pages", "k", "v")
_ARGUMENTS = {"cos": COS, "sin": SIN}
"""The names of fields of ``Places`` in errors, where they differ."""


def append(tensors: tuple[Any, ...], where: tuple[Any, ...], interleaved: bool) -> bool:
    """Writes keys and values to their places; returns whether it did.

    Args:
        tensors: k_pages, v_pages, k and v. where: the tensors of ``Places``.
    """
    present = [each for each in where if each is not None]
    entries = []
    try:
        trains = torch.is_grad_enabled()
        if forward_ad._current_level >= 0:
            return False
        for each in (*tensors, *present):
            if type(each) is not Tensor or each.layout is not torch.strided or not each.is_cuda:
                return False
            if torch._is_functional_tensor(each) or (trains and each.requires_grad):
                return False
            entries.append((each.shape, each.dtype, each.device))
        write = writer(tuple([each is not None for each in where]), tuple(entries), interleaved)
    except Exception:  # the general path raises the error again, or an earlier one
        return False
    if write is None:
        return False
    if where[2] is not None:  # as in the general path: a token that wrong offsets leave out is written nowhere
        present[2] = offsets.clamp(where[2], tensors[2].shape[0])
    return write(*tensors, *present)


@lru_cache(maxsize=1024)
def writer(
    has: tuple[bool, ...], entries: tuple[plan.Metadata, ...], interleaved: bool, added: int = 0
) -> Callable[..., bool] | None:
    """Checks the metadata of an append on a GPU, and returns a function of its tensors that writes k and v.

    None for a call without tokens, and for offsets that the general path casts.

    Args:
        has: which of the tensors of ``Places`` the call has.
        entries: (shape, dtype, device) of k_pages, v_pages, k, v and of these tensors.
        added: see ``append_on_gpu``.
    """
    names = tuple([name for name, exists in zip(_FIELDS, has, strict=True) if exists])
    shown = (*_POOLS, *[_ARGUMENTS.get(name, name) for name in names])
    arguments.check_append({name: plan.facts(*entry) for name, entry in zip(shown, entries, strict=True)})
    (shape, _, device), named = entries[2], dict(zip(names, entries[4:]))
    casts = "cu_seqlens_q" in named and named["cu_seqlens_q"][1] is not torch.int32
    if shape[0] == 0 or casts:
        return None
    return on_device(repeated_on_gpu(interleaved, names, added), device)  # type: ignore[no-any-return]
