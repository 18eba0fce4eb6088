"""The offsets of packed documents as tensors that no kernel can be led outside its buffers by."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from attn_core.seq_info import SeqInfo, check_cu_seqlens
from torch_frontend import plan

Tensor = torch.Tensor


def of(info: SeqInfo, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """A SeqInfo's offsets ``(cu_seqlens_q, cu_seqlens_k)`` as tensors on the device of q.

    Host arrays are checked here, and copied to a device once, not once a call. Offsets that are on a GPU cannot be
    looked at without waiting for it, so they are made safe there, on every call: they may have been written to since
    the last one (a CUDA graph's static buffer is). That costs four small launches.

    Raises:
        ShapeError, SpecError: for host arrays that do not fit the tokens of q and k.
    """
    rows = q.dim() >= 3 and k.dim() >= 3  # else there are no tokens to speak of, and the call is refused for that
    if isinstance(info.cu_seqlens_q, np.ndarray) and isinstance(info.cu_seqlens_k, np.ndarray):
        if q.device.type == "cpu":  # the frontend checks what is on the CPU, of any kind
            return torch.from_numpy(info.cu_seqlens_q), torch.from_numpy(info.cu_seqlens_k)
        compiling = torch.compiler.is_compiling()
        if rows and not compiling:
            check_cu_seqlens(info.cu_seqlens_q, info.max_len_q, side="q", tokens=q.shape[-3])
            check_cu_seqlens(info.cu_seqlens_k, info.max_len_k, side="k", tokens=k.shape[-3])
        with nullcontext() if compiling else torch.inference_mode(False):  # what is kept must do for training, too
            queries, keys = info.converted(q.device, lambda offsets: torch.from_numpy(offsets).to(q.device))
        return (within(queries, q.shape[-3]), within(keys, k.shape[-3])) if compiling and rows else (queries, keys)
    queries, keys = info.cu_seqlens_q, info.cu_seqlens_k
    for side, offsets in (("q", queries), ("k", keys)):
        plan.check_tensor(f"seq_info.cu_seqlens_{side}", offsets)
    if q.device.type == "cpu" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        copy = queries.clone()  # their memory may be a numpy array's, and then autograd does not see who writes there
        return copy, copy if keys is queries else keys.clone()
    fit = all(o.is_cuda and o.dtype == torch.int32 and o.dim() == 1 and o.shape[0] > 1 for o in (queries, keys))
    if not (fit and rows):
        return queries, keys  # on the host the values are checked, and whatever else is wrong is refused by name
    safe = within(queries, q.shape[-3])
    return safe, safe if keys is queries and q.shape[-3] == k.shape[-3] else within(keys, k.shape[-3])


def within(offsets: Tensor, tokens: int) -> Tensor:
    """The offsets, made to start at 0, never to decrease, and to end at ``tokens``; right ones are left as they are."""
    safe = offsets.clamp(0, tokens)
    safe[:1].zero_()
    safe[-1:].fill_(tokens)  # assigning a number to an element would copy it from the host, and wait
    return torch.cummax(safe, 0).values
